"""Sizes of what later drafts add to DFlash: heads that choose tokens in order, convolutions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ChainHeads:
    """Heads of a draft that chooses the tokens of a block one after another, after one pass.

    Attributes:
        rank: width of the head that adds a score by the previous token; 0 without one.
        candidates: most probable tokens of a slot that are chosen from; 0 for all tokens.
        predicts_acceptance: whether a head predicts if the target will accept a token.
        reads_previous: whether that head also reads the embedding of the previous token.
    """

    rank: int
    candidates: int = 0
    predicts_acceptance: bool = False
    reads_previous: bool = False

    def __post_init__(self) -> None:
        if self.reads_previous and not self.rank:
            raise ValueError("a confidence head that reads the previous token needs a Markov head")


@dataclass(frozen=True, kw_only=True)
class BlockConvolution:
    """Convolutions over the rows of a block, before and after attention and MLP.

    Attributes:
        taps: rows that a row sees: itself and those before it in its block.
        group: channels that share the part of their kernel that depends on the row.
    """

    taps: int
    group: int
