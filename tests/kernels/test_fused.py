"""The fused sampling kernel compared with the reference, in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.decoding import sampling
from outpace.decoding.noise import uniform_from_keys
from outpace.decoding.sampling import NoisyChooser, Sample, slot_noise_keys, token_scores
from outpace.decoding.sampling_params import Sampling
from outpace.decoding.truncation import LogitTruncation
from outpace.kernels import fused, read
from outpace.kernels.fused import BLOCK_COLUMNS, read_rows
from outpace.methods import apd
from outpace.methods.apd import Mixture

CPU = torch.device("cpu")
law, scrambled = (
    read.sampling_law,
    read.uniform_noise,
)  # a kernel finds what it calls among its module's names
NAMES = ("confidence", "entropy", "logprob", "margin")
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.3, top_p=0.5, seed=2),
    Sampling(temperature=2.0, top_k=3, seed=3),
    Sampling(temperature=1.5, min_p=0.3, seed=4),
    Sampling(temperature=5.0, top_p=0.9, top_k=40, min_p=0.001, seed=5),
]


def logits_of(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return rows of logits: some flat, some steep, and one banned token."""
    drawn = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    logits = (drawn * torch.linspace(0.5, 6, rows)[:, None]).to(dtype)
    logits[:, vocab // 2] = -1e30
    return logits


def noisy(samplings: Sequence[Sampling], slots: Sequence[Sequence[int]]) -> NoisyChooser:
    """Return the noise of rows with separate settings."""
    return NoisyChooser.from_requests(samplings, range(len(samplings)), slots, CPU)


@pytest.mark.parametrize("turns", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab", "count"), [(11, 3), (5000, 1)])
def test_tokens_and_scores_equal_the_reference(
    vocab: int, count: int, dtype: torch.dtype, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "MAX_REDRAWS", tl.constexpr(turns))
    slots = [range(count)] * len(SAMPLINGS)
    rows, each = slice(0, count * len(SAMPLINGS)), noisy(SAMPLINGS, slots)
    logits = logits_of(rows.stop, vocab, dtype)
    assert vocab < BLOCK_COLUMNS or vocab % BLOCK_COLUMNS
    tokens, found = each.read_fused(logits, rows)
    wanted = each(logits, rows)
    assert torch.equal(tokens, wanted) and len(set(tokens.tolist())) > 3
    for name, expected in token_scores(logits, wanted, set(NAMES)).items():
        torch.testing.assert_close(found[name], expected, atol=2e-5, rtol=2e-5)
    logsum = logits.float().logsumexp(-1)
    torch.testing.assert_close(found["logsum"], logsum, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab", "block"), [(50, 64), (300, 64), (9000, BLOCK_COLUMNS)])
def test_scores_of_the_sampling_distribution_equal_the_reference(
    vocab: int, block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = [Sampling(top_p=0.6), Sampling(top_k=1), Sampling(min_p=0.2, top_k=5)]
    reads = [
        Sample(sampling=each, score_as_drawn=drawn, scores=NAMES)
        for each in (*SAMPLINGS, *cold)
        for drawn in (True, False)
    ]
    slots = [range(1)] * len(reads)
    logits = logits_of(len(reads), vocab, dtype, seed=vocab).clamp(min=-60)
    plain = Sample.make_reader(reads, slots, CPU)(logits.float(), slice(0, len(reads)))
    monkeypatch.setattr(sampling, "runs_triton", lambda device: True)
    monkeypatch.setattr(fused, "BLOCK_COLUMNS", block)
    reader = Sample.make_reader(reads, slots, CPU)
    parts = [reader(logits[n : n + 6], slice(n, n + 6)) for n in range(0, len(reads), 6)]
    assert torch.equal(torch.cat([part.tokens for part in parts]), plain.tokens)
    for name, expected in plain.scores.items():
        found = torch.cat([part.scores[name] for part in parts])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain.scores["confidence"][::2], plain.scores["confidence"][1::2])


@triton.jit
def fill(keys, out, WIDTH: tl.constexpr):
    """Write the uniform numbers of a key."""
    row, columns = tl.program_id(0), tl.arange(0, WIDTH)
    key = tl.load(keys + row)
    numbers = scrambled(columns, key.to(tl.uint32), (key >> 32).to(tl.uint32))
    tl.store(out + row * WIDTH + columns, numbers)


def test_noise_equals_the_reference_to_the_bit() -> None:
    keys = slot_noise_keys([Sampling(seed=7)], [3], [range(4)])
    out = torch.empty(4, 64)
    fill[4,](keys, out, WIDTH=64)
    assert torch.equal(out, uniform_from_keys(keys, 64))


@pytest.mark.parametrize("turns", [0, 1, 3, 100])
def test_filters_accept_the_tokens_of_the_reference(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "MAX_REDRAWS", tl.constexpr(turns))
    samplings = [
        Sampling(temperature=1e4, top_p=0.3, seed=1),
        Sampling(temperature=1e4, top_k=2, seed=2),
        Sampling(temperature=1e4, min_p=0.9999, seed=3),
    ]
    slots = [range(4)] * 3
    each, logits = noisy(samplings, slots), logits_of(1, 60).repeat(12, 1)
    tokens = each.read_fused(logits, slice(0, 12))[0]
    assert torch.equal(tokens, each(logits, slice(0, 12)))
    best = logits[0].topk(2).indices.tolist()
    assert set(tokens[4:8].tolist()) <= set(best)


@triton.jit
def bounds(logits, tops, settings, out, vocab, BLOCK: tl.constexpr):
    """Write the threshold of a row, and the mass above it."""
    me = tl.program_id(0)
    row, here = logits + me * vocab, settings + 4 * me
    heat, top_p, min_p = tl.load(here), tl.load(here + 1), tl.load(here + 3)
    top_k, top = tl.load(here + 2).to(tl.int64), tl.load(tops + me)
    _, edge, total, _ = law(row, row, 0.0, vocab, heat, top, top_p, top_k, min_p, BLOCK, False)
    tl.store(out + 2 * me, edge)
    tl.store(out + 2 * me + 1, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_thresholds_equal_the_reference(dtype: torch.dtype) -> None:
    cuts = [
        *({"top_p": 0.1}, {"top_p": 0.6}, {"top_p": 0.999}, {"top_k": 1}, {"top_k": 7}),
        *({"min_p": 0.1}, {"top_k": 39}, {"top_p": 0.7, "top_k": 9, "min_p": 0.05}),
    ]
    samplings = [Sampling(temperature=0.8, **cut) for cut in cuts]
    drawn = torch.randn(len(cuts), 130, generator=torch.Generator().manual_seed(0))
    rows = [
        drawn * 2,
        (drawn * 2).round(),
        drawn * 0,
        drawn.sign() * 0.0,
        drawn.exp(),
        -drawn.exp(),
    ]
    logits = torch.cat(rows).to(dtype)
    many = samplings * len(rows)
    wanted = LogitTruncation.from_requests(many, [[0]] * len(many), CPU)(
        logits, slice(0, len(many))
    )
    each = [(s.temperature, s.top_p, s.top_k or 130, math.log(s.min_p or 1e-300)) for s in many]
    settings, out = torch.tensor(each), torch.empty(len(many), 2)
    settings[settings < -600] = -torch.inf
    bounds[len(many),](logits, logits.float().amax(-1), settings, out, 130, BLOCK=64)
    assert torch.equal(logits.float() / settings[:, :1] >= out[:, :1], wanted.isfinite())
    total = (wanted - wanted.amax(-1, keepdim=True)).exp().sum(-1)
    torch.testing.assert_close(out[:, 1], total, atol=1e-5, rtol=1e-5)


def test_a_view_of_rows_is_read_in_place() -> None:
    wide = logits_of(4, 40)
    wide[:, 30:] = 50.0
    view = wide[1:3, :30]
    each = noisy([Sampling(temperature=1.0)], [range(2)])
    assert torch.equal(each.read_fused(view, slice(0, 2))[0], each(view, slice(0, 2)))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinity_are_selected(value: float, temperature: float) -> None:
    logits = logits_of(2, 9)
    logits[0, 6] = value
    each = noisy([Sampling(temperature=temperature)], [range(2)])
    assert each.read_fused(logits, slice(0, 2))[0][0] == 6


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mixture_equals_the_reference(
    ratio: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = Sampling(temperature=temperature, top_p=0.9, seed=3)
    guess, logits = logits_of(3, 30, seed=1), logits_of(3, 26, seed=2)
    reads = [Mixture(guess=guess, ratio=ratio, sampling=sampled, step=1)]
    found = []
    for kernels in (False, True):
        for module in (apd, sampling):
            monkeypatch.setattr(module, "runs_triton", lambda device, kernels=kernels: kernels)
        found.append(Mixture.make_reader(reads, [range(3)], CPU)(logits, slice(0, 3)).tokens)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({"scores": NAMES}, 1),
        ({"sampling": Sampling(temperature=0.5)}, 1),
        ({"scores": ("confidence",), "sampling": Sampling(temperature=0.5, top_p=0.9)}, 1),
        ({"scores": NAMES, "score_as_drawn": True, "sampling": Sampling(temperature=0.5)}, 1),
        ({}, 0),
    ],
)
def test_reads_use_the_kernel_if_possible(
    fields: dict[str, Any], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []

    def count(*given: Any) -> Any:
        counted.append(given)
        return read_rows(*given)

    monkeypatch.setattr(sampling, "read_rows", count)
    logits, reads, slots = logits_of(6, 20), [Sample(**fields)] * 2, [range(3), range(2, 5)]
    plain = Sample.make_reader(reads, slots, CPU)(logits, slice(0, 6))
    monkeypatch.setattr(sampling, "runs_triton", lambda device: True)
    found = Sample.make_reader(reads, slots, CPU)(logits, slice(0, 6))
    assert len(counted) == calls
    assert torch.equal(found.tokens, plain.tokens) and found.scores.keys() == plain.scores.keys()
    for name, expected in plain.scores.items():
        torch.testing.assert_close(found.scores[name], expected, atol=1e-5, rtol=1e-5)
