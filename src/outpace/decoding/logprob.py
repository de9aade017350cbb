"""Log-probabilities of tokens, with those of the most probable tokens of the same slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.decoding.processor import BANNED_LOGIT

TopTokens = Sequence[tuple[int, float]]
"""Tokens with their log-probabilities, the most probable first."""


class TokenLogprob(float):
    """Log-probability of a token.

    Attributes:
        top: The most probable tokens of its slot.
        rank: 1 for the most probable token of its slot, and so on; None if it was not computed.
    """

    top: TopTokens
    rank: int | None

    def __new__(cls, value: float, top: TopTokens, rank: int | None = None) -> TokenLogprob:
        """Return the number `value` with the tokens `top` and a rank."""
        found = super().__new__(cls, value)
        found.top, found.rank = top, rank
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the tokens."""
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
