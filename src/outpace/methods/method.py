"""A decoding method: frozen options and a generator that yields forwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from outpace.decoding import Decoding, Sequence, Verify


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A decoding algorithm with its options; the fields of a subclass are its flags.

    Attributes:
        roles: names of the fields that name further models, such as a draft or a verifier.
        feature_roles: those of them whose models read hidden states of the target.
        masked: whether it feeds masks, so that its target needs a mask token.
        bidirectional: whether it decodes diffusion models (rows see later rows) or causal ones.
    """

    roles: ClassVar[tuple[str, ...]] = ()
    feature_roles: ClassVar[tuple[str, ...]] = ()
    masked: ClassVar[bool] = False
    bidirectional: ClassVar[bool] = False

    @abstractmethod
    def decode(self, seq: Sequence) -> Decoding:
        """Yield forwards, be sent their predictions, and commit tokens until `seq` ends."""

    def check(self, seq: Sequence) -> None:  # noqa: B027
        """Raise `ValueError` for a request that these options do not fit."""

    def slots(self, prompt: int, max_tokens: int) -> int:
        """Cache slots that a request needs in each of its models."""
        return prompt + max_tokens

    @property
    def adaptive(self) -> bool:
        """Whether it wants `seq.pace` to know what passes take."""
        return False

    def models(self) -> dict[str, str]:
        """Name of the model in each further role."""
        return {role: getattr(self, role) for role in self.roles}


Length = int | Literal["auto"]
"""A number of tokens, or as many as pay."""


def check_length(tokens: Length, verify: Verify) -> None:
    """Raise `ValueError` for a number below one, or one that would decide on the tokens."""
    if isinstance(tokens, int):
        at_least_one(tokens=tokens)
        return
    one_of(tokens=(tokens, Literal["auto"]))
    if verify == "rejection":
        raise ValueError(
            "under verify='rejection' another number of drafts gives other tokens, so that "
            "tokens='auto' would not give the same text again: give tokens a number"
        )


def one_of(**options: tuple[str, object]) -> None:
    """Raise `ValueError` for an option that is none of the words of its type."""
    for name, (value, kind) in options.items():
        if value not in get_args(kind):
            words = " or ".join(map(repr, get_args(kind)))
            raise ValueError(f"{name} must be {words}, not {value!r}")


def at_least_one(**options: int | None) -> None:
    """Raise `ValueError` for an option that counts something and is below one."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def fraction(**options: float) -> None:
    """Raise `ValueError` for an option that is a share of a whole and lies outside [0, 1]."""
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, not {value}")


def check_blocks(seq: Sequence, block: int, *, whole: bool) -> None:
    """Raise `ValueError` for a block that does not fit, or not a `whole` number of times."""
    if block > seq.max_tokens:
        raise ValueError(
            f"block={block} is larger than the canvas of max_tokens={seq.max_tokens}; "
            f"{seq.max_tokens} is the largest that fits"
        )
    if whole and seq.max_tokens % block:
        raise ValueError(
            f"max_tokens={seq.max_tokens} is no whole number of blocks of {block}: "
            f"use {nearest(seq.max_tokens, block)}"
        )


def nearest(value: int, factor: int) -> str:
    """The multiples of a factor next to a value, in words."""
    below = value - value % factor
    return f"{below} or {below + factor}" if below else f"{factor}"
