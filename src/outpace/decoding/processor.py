"""What changes the logits of a request's rows, between the head of a model and their read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

NEVER = -1e30  # finite, so that mixtures of logits stay numbers


class Processor(Protocol):
    """Bans, biases and penalties of one request."""

    def __call__(self, logits: Tensor, slots: Sequence[int]) -> None:
        """Change `logits f32[r, V]` in place; row i predicts slot `slots[i]`."""
        ...


@dataclass(frozen=True, slots=True)
class Shortened:
    """No token from `size` on: what only the longer of two vocabularies has is padding."""

    size: int

    def __call__(self, logits: Tensor, slots: Sequence[int]) -> None:
        """Ban what lies behind the end."""
        logits[:, self.size :] = NEVER
