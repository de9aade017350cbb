"""Bans, biases and penalties, against results worked out by hand."""

from __future__ import annotations

import torch

from outpace.decoding.processor import BANNED_LOGIT, MinTokens, Penalties, TokenBias


def test_a_bias_is_added() -> None:
    logits = torch.zeros(2, 4)
    TokenBias({1: 2.5, 3: -4})(logits, [5, 6], [])
    assert logits.tolist() == [[0, 2.5, 0, -4]] * 2


def test_an_answer_does_not_end_early() -> None:
    logits = torch.zeros(3, 4)
    MinTokens(frozenset((1, 2)), 6)(logits, [5, 6, 4], [])
    never = torch.tensor(BANNED_LOGIT).item()
    assert logits.tolist() == [[0, never, never, 0], [0] * 4, [0, never, never, 0]]


def test_penalties_count_earlier_tokens() -> None:
    text = [0, 1, 2, 2, 3]  # the first two are the prompt
    logits = torch.tensor([[1.0, -1.0, 4.0, 4.0]] * 3)
    Penalties(begin=2, presence=0.5, frequency=0.25)(logits, [2, 4, 5], text)
    assert logits.tolist() == [[1, -1, 4, 4], [1, -1, 3.0, 4], [1, -1, 3.0, 3.25]]
    logits = torch.tensor([[1.0, -1.0, 4.0, 4.0]] * 2)
    Penalties(begin=2, repetition=2.0)(logits, [2, 5], text)
    assert logits.tolist() == [[0.5, -2, 4, 4], [0.5, -2, 2, 2]]


def test_penalties_keep_bans() -> None:
    logits = torch.tensor([[BANNED_LOGIT, 1.0]])
    Penalties(begin=0, presence=1e4, frequency=1e4, repetition=1e4)(logits, [3], [0, 0, 0])
    assert logits.isfinite().all() and logits[0, 0] <= BANNED_LOGIT
