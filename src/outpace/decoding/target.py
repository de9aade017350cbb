"""What a model is, and what a request knows of the one that it decodes with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

Rank = Literal["confidence", "margin", "entropy"]
"""What holes are ranked by: a probability, a lead, or how little entropy there is."""

Order = Literal["confidence", "margin", "entropy", "left_to_right", "random", "origin"]
"""A rank, or one of the orders that ask for no score: from left to right, at random, or each hole
by a toss of its own."""


class Kind(Enum):
    """What a model is, in the words of messages."""

    CAUSAL = "causal model"
    FILLING = "causal model that fills masks"
    DIFFUSION = "diffusion model"
    BLOCK = "block diffusion model"
    DRAFT = "draft that reads features"
    ADDING = "draft that adds features"
    EXTENDING = "draft that extends features"

    @classmethod
    def causal(cls, mask_id: int | None) -> Kind:
        """A causal model; one that has a mask token fills masks as well."""
        return cls.CAUSAL if mask_id is None else cls.FILLING

    @property
    def plural(self) -> str:
        """Several of them."""
        noun, that, rest = self.value.partition(" that ")
        verb, space, what = rest.partition(" ")
        return f"{noun}s{that}{verb.removesuffix('s')}{space}{what}"


CAUSAL_KINDS = (Kind.CAUSAL, Kind.FILLING)
MASKED_DRAFT_KINDS = (Kind.DRAFT, Kind.ADDING)
"""Drafts that fill a block of masks."""

DRAFT_KINDS = (*MASKED_DRAFT_KINDS, Kind.EXTENDING)
"""Kinds that are nothing without a target."""


def named(kinds: tuple[Kind, ...]) -> list[Kind]:
    """Those of some kinds that are told; causal models include those that fill masks."""
    return [kind for kind in kinds if kind is not Kind.FILLING or Kind.CAUSAL not in kinds]


def singular(kinds: tuple[Kind, ...]) -> str:
    """One model of some kinds."""
    return " or a ".join(kind.value for kind in named(kinds))


def plural(kinds: tuple[Kind, ...]) -> str:
    """Several models of some kinds."""
    return " or ".join(kind.plural for kind in named(kinds))


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a method may know of the model that it decodes.

    Attributes:
        shift: 1 where row *p - 1* predicts slot *p*, 0 where row *p* does.
        mask_id: the token of a hole, of the model that is fed holes: the target, or a draft that
            reads or adds its features; -1 where none is.
        block: tokens of a block that this model was trained with or is decoded by; None for any.
        blocked: whether its rows see no further than the end of their block, the blocks counted
            from slot 0.
        order: which holes are filled next, where a method does not say.
        eps: last time of the schedule `timesteps`; 0 for the schedule `even`.
        drawn: whether holes are scored by the law that tokens are drawn from, or by raw logits.
        null_prompt: whether the model was trained to go on from a prompt of masks.
        padding: tokens that stand behind an answer.
        adding: whether its draft adds features to the rows of the text, which it is fed; else it
            reads them in front of its rows.
    """

    shift: int = 1
    mask_id: int = -1
    block: int | None = None
    blocked: bool = False
    order: Order = "confidence"
    eps: float = 0.0
    drawn: bool = False
    null_prompt: bool = False
    padding: tuple[int, ...] = ()
    adding: bool = False
