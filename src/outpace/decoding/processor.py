"""Logits processors of a request, which run between the model's head and the read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

BANNED_LOGIT = -1e30  # finite, so that mixtures of logits stay numbers


class Processor(Protocol):
    """Bans, biases and penalties of one request."""

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Change `logits f32[r, V]` in place; row i predicts slot `slots[i]`.

        `text` is the text of the forward from slot 0 on: committed tokens, proposed tokens, and the
        mask in each hole.
        """
        ...


@dataclass(frozen=True, slots=True)
class VocabularyLimit:
    """Bans the tokens from `size` on, which only the longer of two vocabularies has."""

    size: int

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Ban the tokens beyond the limit."""
        logits[:, self.size :] = BANNED_LOGIT


@dataclass(frozen=True, slots=True)
class TokenBias:
    """Adds a number to the logits of some tokens."""

    biases: Mapping[int, float]

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Add each bias to its column."""
        add = torch.tensor(list(self.biases.values()), device=logits.device)
        logits[:, list(self.biases)] += add


@dataclass(frozen=True, slots=True)
class MinTokens:
    """Bans `tokens` before slot `slot`, so that an answer does not end too early."""

    tokens: frozenset[int]
    slot: int

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Ban them in the rows of earlier slots."""
        early = [row for row, slot in enumerate(slots) if slot < self.slot]
        for token in self.tokens:
            logits[early, token] = BANNED_LOGIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Lowers the logits of tokens that the text before a slot contains.

    `frequency` is subtracted once for each occurrence in the answer, which begins at slot `begin`;
    `presence` once if there is any. Logits of tokens in prompt or answer are divided by
    `repetition` where positive, and else multiplied by it (Keskar et al., 2019).
    """

    begin: int
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Penalise each row by the text before its slot."""
        for row, slot in zip(logits, slots, strict=True):
            self.apply_repetition(row, text[:slot])
            if counts := Counter(text[self.begin : slot]):
                times = torch.tensor(list(counts.values()), device=row.device)
                row[list(counts)] -= self.presence + self.frequency * times

    def apply_repetition(self, row: Tensor, text: Sequence[int]) -> None:
        """Scale the logits of all tokens of a sequence by the repetition penalty."""
        if self.repetition != 1:
            columns = list(set(text))
            old = row[columns]
            row[columns] = torch.where(old > 0, old / self.repetition, old * self.repetition)
