"""What changes the logits of a request's rows, between the head of a model and their read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

NEVER = -1e30  # finite, so that mixtures of logits stay numbers


class Processor(Protocol):
    """Bans, biases and penalties of one request."""

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Change `logits f32[r, V]` in place; row i predicts slot `slots[i]`.

        `text` holds what the request's forward knows, from slot 0 on: tokens that are committed,
        tokens that are proposed, and the mask where there is a hole.
        """
        ...


@dataclass(frozen=True, slots=True)
class Shortened:
    """No token from `size` on: what only the longer of two vocabularies has is padding."""

    size: int

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Ban what lies behind the end."""
        logits[:, self.size :] = NEVER


@dataclass(frozen=True, slots=True)
class Bias:
    """A number added to the logits of some tokens."""

    biases: Mapping[int, float]

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Add each to its column."""
        add = torch.tensor(list(self.biases.values()), device=logits.device)
        logits[:, list(self.biases)] += add


@dataclass(frozen=True, slots=True)
class NotBefore:
    """No token of `tokens` in front of slot `slot`: an answer must not end too early."""

    tokens: frozenset[int]
    slot: int

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Ban them in the rows of slots in front."""
        early = [row for row, slot in enumerate(slots) if slot < self.slot]
        for token in self.tokens:
            logits[early, token] = NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Tokens that stand in front of a slot become less likely there.

    `frequency` is subtracted once for each time that a token stands in the answer, which begins at
    slot `begin`, and `presence` once if it does at all. Logits of tokens in prompt or answer are
    divided by `repetition` where positive and else multiplied by it (Keskar et al., 2019).
    """

    begin: int
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Each row by what is known in front of its slot."""
        for row, slot in zip(logits, slots, strict=True):
            self.repeated(row, text[:slot])
            if counts := Counter(text[self.begin : slot]):
                times = torch.tensor(list(counts.values()), device=row.device)
                row[list(counts)] -= self.presence + self.frequency * times

    def repeated(self, row: Tensor, text: Sequence[int]) -> None:
        """Push the logits of all tokens of a text down by a factor."""
        if self.repetition != 1:
            known = list(set(text))
            some = row[known]
            row[known] = torch.where(some > 0, some / self.repetition, some * self.repetition)
