"""Kinds of models, and the properties of the target that a request may use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

Rank = Literal["confidence", "margin", "entropy"]
"""Scores that holes are ranked by; for entropy, lower is better."""

HoleOrder = Literal["confidence", "margin", "entropy", "left_to_right", "random", "origin"]
"""A ranking score, or an order without scores: left to right, random, or independent per hole."""


class Kind(Enum):
    """Kinds of models, with the names used in messages."""

    CAUSAL = "causal model"
    MASK_FILLING = "causal model that fills masks"
    CAUSAL_BLOCK = "causal model that fills blocks"
    DIFFUSION = "diffusion model"
    BLOCK = "block diffusion model"
    DFLASH = "draft that reads features"
    DFLASH_FUSED = "draft that adds features"
    EAGLE = "draft that extends features"

    @classmethod
    def causal_kind(cls, mask_id: int | None) -> Kind:
        """Return the kind of a causal model, which fills masks if it has a mask token."""
        return cls.CAUSAL if mask_id is None else cls.MASK_FILLING

    @property
    def plural_noun(self) -> str:
        noun, that, rest = self.value.partition(" that ")
        verb, space, what = rest.partition(" ")
        return f"{noun}s{that}{verb.removesuffix('s')}{space}{what}"


CAUSAL_KINDS = (Kind.CAUSAL, Kind.MASK_FILLING, Kind.CAUSAL_BLOCK)
MASKED_DRAFT_KINDS = (Kind.DFLASH, Kind.DFLASH_FUSED)
"""Drafts that predict a block of masks."""

DRAFT_KINDS = (*MASKED_DRAFT_KINDS, Kind.EAGLE)
"""Drafts, which cannot run without a target."""


def distinct_kinds(kinds: tuple[Kind, ...]) -> list[Kind]:
    """Drop models that also fill masks where causal models, which include them, are listed."""
    return [kind for kind in kinds if kind not in CAUSAL_KINDS[1:] or Kind.CAUSAL not in kinds]


def singular_noun(kinds: tuple[Kind, ...]) -> str:
    """Return the name of one model of these kinds, for messages."""
    return " or a ".join(kind.value for kind in distinct_kinds(kinds))


def plural_noun(kinds: tuple[Kind, ...]) -> str:
    return " or ".join(kind.plural_noun for kind in distinct_kinds(kinds))


@dataclass(frozen=True, kw_only=True)
class Target:
    """Properties of the decoded model that methods may use."""

    shift: int = 1
    """1 where row *p - 1* predicts slot *p*, 0 where row *p* does."""
    mask_id: int = -1
    """Mask token of the model that reads masks: the target, or a DFlash draft; -1 without one."""
    block: int | None = None
    """Block length of the model, as trained or decoded; None for any."""
    drafts_from_last: bool = False
    """Whether the row of the last token predicts the first draft, and the last mask of the block
    one after it (DSpark), instead of each mask its own slot."""
    predicts_acceptance: bool = False
    """Whether its draft predicts if a token will be accepted."""
    is_block_causal: bool = False
    """Whether rows see no further than the end of their block, counted from slot 0."""
    order: HoleOrder = "confidence"
    """Default order in which holes are filled."""
    eps: float = 0.0
    """Last time of the schedule `timestep_counts`; 0 for the schedule `even_counts`."""
    score_as_drawn: bool = False
    """Whether holes are scored by the sampling distribution, or by raw logits."""
    null_prompt: bool = False
    """Whether the model was trained on prompts of masks, as guidance needs."""
    padding: tuple[int, ...] = ()
    """Tokens that pad a finished answer."""
    adds_features: bool = False
    """Whether its draft combines features with the rows of the text (fused), instead of reading
    them as context."""
    is_recurrent: bool = False
    """Whether a forward cannot start before the last token of the text, except at slot 0."""
    mask_shift: int | None = None
    """In a causal model that fills blocks, 1 where the row of a mask predicts the next slot, 0
    where it predicts its own; None for other models. Only the rows of the open block see one
    another, those before it are causal."""
    has_mtp_draft: bool = False
    """Whether its draft is a head for multi-token prediction, trained to predict one token or a
    few."""
