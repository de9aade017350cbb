"""A decoding method: frozen options and a generator that yields forwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from outpace.decoding import Decoding, Sequence


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A decoding algorithm with its options; the fields of a subclass are its flags.

    Attributes:
        roles: names of the fields that name further models, such as a draft or a verifier.
        masked: whether it feeds masks, so that its target needs a mask token.
        bidirectional: whether it decodes diffusion models (rows see later rows) or causal ones.
    """

    roles: ClassVar[tuple[str, ...]] = ()
    masked: ClassVar[bool] = False
    bidirectional: ClassVar[bool] = False

    @abstractmethod
    def decode(self, seq: Sequence) -> Decoding:
        """Yield forwards, be sent their predictions, and commit tokens until `seq` ends."""

    def slots(self, prompt: int, max_tokens: int) -> int:
        """Cache slots that a request needs in each of its models."""
        return prompt + max_tokens

    def models(self) -> dict[str, str]:
        """Name of the model in each further role."""
        return {role: getattr(self, role) for role in self.roles}


def at_least_one(**options: int | None) -> None:
    """Raise `ValueError` for an option that counts something and is below one."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
