"""Loose verification: the published rule, row by row and worked out by hand."""

from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outpace.decoding import Sample, Sampling
from outpace.decoding.accept import Fly, top_entropy
from outpace.decoding.processor import BANNED_LOGIT

CPU = torch.device("cpu")
VOCAB = 5
DOUBT = 0.6 * log(5)
"""Entropy terms of three of five equally likely tokens."""


def row(token: int | None = None) -> list[float]:
    """Return logits of a target that is certain of a token, or uncertain and predicts token 0."""
    return [12.0 * (place == token) for place in range(VOCAB)]


def loose(drafted: list[int], window: int = 2, entropy: float = 0.3, **given) -> Fly:
    return Fly(drafted=tuple(drafted), window=window, entropy=entropy, **given)


def said(reads: list[Fly], logits: list[Tensor]) -> list[list[int]]:
    slots = [range(len(each)) for each in logits]
    rows = torch.cat(logits)
    tokens = Fly.make_reader(reads, slots, CPU)(rows, slice(0, len(rows))).tokens
    return [part.tolist() for part in tokens.split([len(each) for each in logits])]


@pytest.mark.parametrize(
    ("drafted", "target", "tokens"),
    [
        ([3, 1, 2], [None, 1, 2, 4], [3, 1, 2, 4]),
        ([3, 1, 2], [0, 1, 2, 4], [0, 1, 2, 4]),  # the target is certain of another
        ([3, 3, 2, 2], [None, 0, 2, 2, 1], [0, 0, 2, 2, 1]),  # the next one differs
        ([3, 1, 3, 2], [None, 1, 0, 2, 1], [0, 1, 0, 2, 1]),  # the last of the window differs
        ([3, 1], [None, 1, 2], [0, 1, 2]),  # too few follow
        ([1, 3, 1, 2], [1, None, 1, 2, 4], [1, 3, 1, 2, 4]),
        # A loosely accepted draft does not count as agreeing.
        ([3, 1, 3, 1, 2], [None, 1, None, 1, 2, 4], [0, 1, 3, 1, 2, 4]),
        ([3, 1, 2, 4, 1, 2], [None, 1, 2, None, 1, 2, 3], [3, 1, 2, 4, 1, 2, 3]),
    ],
)
def test_the_rule(drafted: list[int], target: list[int | None], tokens: list[int]) -> None:
    logits = torch.tensor([row(token) for token in target])
    assert said([loose(drafted)], [logits]) == [tokens]


@pytest.mark.parametrize(("entropy", "kept"), [(DOUBT - 1e-4, True), (DOUBT + 1e-4, False)])
def test_the_gate_opens_at_the_entropy(entropy: float, kept: bool) -> None:
    logits = torch.tensor([row(), row(1), row(2), row(4)])
    assert (said([loose([3, 1, 2], entropy=entropy)], [logits])[0][0] == 3) is kept


def test_entropy_covers_the_top_three_and_no_banned_token() -> None:
    logits = torch.tensor([[0.5, 0.125, 0.25, 0.125]]).log() + 7
    torch.testing.assert_close(top_entropy(logits), torch.tensor([1.375 * log(2)]))
    torch.testing.assert_close(top_entropy(torch.zeros(1, 2)), torch.tensor([log(2)]))
    assert top_entropy(torch.tensor([[0.0, BANNED_LOGIT, BANNED_LOGIT, BANNED_LOGIT]])) == 0
    banned = torch.tensor([row(), row(1), row(2), row(4)])
    banned[0, 3] = BANNED_LOGIT
    assert said([loose([3, 1, 2], entropy=0)], [banned]) == [[0, 1, 2, 4]]


def by_the_rule(drafted: list[int], tokens: list[int], logits: Tensor, read: Fly) -> list[int]:
    """Apply the published rule in loops; `tokens` are the target's."""
    probabilities = logits.double().softmax(-1)
    agree = [draft == token for draft, token in zip(drafted, tokens, strict=False)]
    kept = list(tokens)
    for at in range(len(drafted) - read.window):
        best = sorted(probabilities[at].tolist())[-3:]
        entropy = -sum(p * log(p) for p in best)
        behind = agree[at + 1 : at + 1 + read.window]
        if not agree[at] and entropy >= read.entropy and all(behind):
            kept[at] = drafted[at]
    return kept


cases = st.tuples(
    st.integers(0, 8), st.integers(1, 3), st.sampled_from([0.0, 0.5, 0.9]), st.integers(0, 99)
)


@given(st.lists(cases, min_size=1, max_size=4), st.sampled_from([0.0, 1.0]))
def test_batched_reads_follow_the_rule_separately(cases, temperature: float) -> None:
    reads, rows, expected = [], [], []
    for count, window, entropy, seed in cases:
        noise = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(count + 1, VOCAB, generator=noise)
        sampling = Sampling(temperature=temperature, seed=seed)
        slots = range(count + 1)
        plain = Sample.make_reader([Sample(sampling=sampling)], [slots], CPU)
        tokens = plain(logits, slice(0, count + 1)).tokens.tolist()
        other = torch.rand(count, generator=noise) < 0.25
        drafted = [(token + bool(o)) % VOCAB for token, o in zip(tokens, other, strict=False)]
        reads.append(loose(drafted, window, entropy, sampling=sampling))
        rows.append(logits)
        expected.append(by_the_rule(drafted, tokens, logits, reads[-1]))
    assert said(reads, rows) == expected
