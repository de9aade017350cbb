"""Logits processors of a request, which run between the model's head and the read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
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
        logits[:, self.size :] = BANNED_LOGIT


@dataclass(frozen=True, slots=True)
class TokenBias:
    """Adds a number to the logits of some tokens."""

    biases: Mapping[int, float]

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        add = torch.tensor(list(self.biases.values()), device=logits.device)
        logits[:, list(self.biases)] += add


@dataclass(frozen=True, slots=True)
class MinTokens:
    """Bans `tokens` before slot `slot`, so that an answer does not end too early."""

    tokens: frozenset[int]
    slot: int

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
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
        for row, slot in zip(logits, slots, strict=True):
            if self.repetition != 1:
                columns = list(set(text[:slot]))
                old = row[columns]
                row[columns] = torch.where(old > 0, old / self.repetition, old * self.repetition)
            if counts := Counter(text[self.begin : slot]):
                times = torch.tensor(list(counts.values()), device=row.device)
                row[list(counts)] -= self.presence + self.frequency * times


TopTokens = Sequence[tuple[int, float]]
"""Tokens with their log-probabilities, the most probable first."""


class TokenLogprob(float):
    """Log-probability of a token."""

    top: TopTokens
    """The most probable tokens of its slot."""
    rank: int | None
    """1 for the most probable token of its slot, and so on; None if it was not computed."""

    def __new__(cls, value: float, top: TopTokens, rank: int | None = None) -> TokenLogprob:
        found = super().__new__(cls, value)
        found.top, found.rank = top, rank
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenLogprob, (float(self), self.top, self.rank)


def top_tokens(score: float | None) -> TopTokens:
    """Return the most probable tokens of a slot by the log-probability of its token, if known."""
    return score.top if isinstance(score, TokenLogprob) else ()


def find_top_tokens(logits: Tensor, count: int) -> Tensor:
    """Return ids and log-probabilities `f64[2, count, r]` of the most probable tokens of logits."""
    best = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]), -1)
    return torch.stack([best.indices.double(), best.values.double()]).transpose(1, 2)


def attach_top_tokens(
    logprobs: Sequence[float], table: np.ndarray[Any, np.dtype[np.float64]]
) -> list[float]:
    """Return log-probabilities `[r]` with the most probable tokens of a table `[2, count, r]`.

    Banned tokens are left out.
    """
    tokens, scores = table[0].astype(np.int64).T.tolist(), table[1].T.tolist()
    return [
        TokenLogprob(value, [pair for pair in zip(*row, strict=True) if pair[1] > BANNED_LOGIT / 2])
        for value, *row in zip(logprobs, tokens, scores, strict=True)
    ]
