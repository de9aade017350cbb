"""The sampling kernels compared with the reference, in Triton's interpreter."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from helpers import finish, tokens
from outpace.decoding import accept, sampling
from outpace.decoding.accept import Rejection
from outpace.decoding.sampling import NoisyChooser, Readout, Sample, token_scores
from outpace.decoding.sampling_params import Sampling
from outpace.kernels import fused, read
from outpace.kernels.fused import BLOCK_COLUMNS, read_rows
from outpace.methods import Speculative, apd
from outpace.methods.apd import Mixture
from workload import Request, new_engine

CPU = torch.device("cpu")
NAMES = ("confidence", "entropy", "logprob", "margin")
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, top_p=0.5, seed=2),
    Sampling(temperature=2.0, top_k=3, seed=3),
    Sampling(temperature=1.5, min_p=0.3, seed=4),
    Sampling(temperature=5.0, top_p=0.9, top_k=40, min_p=0.001, seed=5),
]
FEW = [SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[5]]

Kernels = Callable[[bool], None]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Return a function that enables the kernels, with blocks of a few columns."""
    monkeypatch.setattr(fused, "BLOCK_COLUMNS", 64)

    def enable(fits: bool) -> None:
        for module in (sampling, accept, apd):
            monkeypatch.setattr(module, "runs_triton", lambda device: fits)

    return enable


def random_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows of logits: some flat, some steep, and one banned token."""
    drawn = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    logits = (drawn * torch.linspace(0.5, 6, rows)[:, None]).to(dtype)
    logits[:, vocab // 2] = -1e30
    return logits


def noisy(samplings: Sequence[Sampling], slots: Sequence[Sequence[int]]) -> NoisyChooser:
    """Return the noise of rows with separate settings."""
    return NoisyChooser.from_requests(samplings, range(len(samplings)), slots, CPU)


def check_scores(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() >= wanted.keys()
    for name, expected in wanted.items():
        torch.testing.assert_close(found[name], expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("redraws", [0, 8])
@pytest.mark.parametrize(
    ("vocab", "count", "dtype"),
    [
        (11, 2, torch.float32),
        (11, 2, torch.bfloat16),
        pytest.param(5000, 1, torch.float16, marks=pytest.mark.nightly),
        pytest.param(5000, 1, torch.float32, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_tokens_and_scores_equal_the_reference(
    vocab: int, count: int, dtype: torch.dtype, redraws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "MAX_REDRAWS", tl.constexpr(redraws))
    rows = slice(0, count * len(SAMPLINGS))
    each = noisy(SAMPLINGS, [range(count)] * len(SAMPLINGS))
    logits = random_logits(rows.stop, vocab, dtype)
    found, scores = each.read_fused(logits, rows)
    wanted = each(logits, rows)
    assert torch.equal(found, wanted) and len(set(found.tolist())) > 3
    logsum = logits.float().logsumexp(-1)
    check_scores(scores, {**token_scores(logits, wanted, set(NAMES)), "logsum": logsum})


@pytest.mark.parametrize(
    ("vocab", "block", "dtype"),
    [
        (50, 32, torch.float16),
        *(
            pytest.param(vocab, block, dtype, marks=pytest.mark.nightly)
            for vocab, block in ((300, 64), (9000, BLOCK_COLUMNS))
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ),
    ],
    ids=str,
)
def test_scores_of_the_sampling_distribution_equal_the_reference(
    vocab: int, block: int, dtype: torch.dtype, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = [Sampling(top_p=0.6), Sampling(min_p=0.2, top_k=5)]
    reads = [
        Sample(sampling=each, score_as_drawn=drawn, scores=NAMES)
        for each in (*SAMPLINGS, *cold)
        for drawn in (True, False)
    ]
    slots = [range(1)] * len(reads)
    logits = random_logits(len(reads), vocab, dtype).clamp(min=-60)
    kernels(False)
    plain = Sample.make_reader(reads, slots, CPU)(logits.float(), slice(0, len(reads)))
    kernels(True)
    monkeypatch.setattr(fused, "BLOCK_COLUMNS", block)
    reader = Sample.make_reader(reads, slots, CPU)
    parts = [reader(logits[n : n + 6], slice(n, n + 6)) for n in range(0, len(reads), 6)]
    assert torch.equal(torch.cat([part.tokens for part in parts]), plain.tokens)
    found = {name: torch.cat([part.scores[name] for part in parts]) for name in NAMES}
    check_scores(found, plain.scores)
    assert not torch.allclose(plain.scores["confidence"][::2], plain.scores["confidence"][1::2])


@pytest.mark.parametrize(
    "redraws", [1, *(pytest.param(n, marks=pytest.mark.nightly) for n in (0, 3, 100))]
)
def test_filters_accept_the_tokens_of_the_reference(
    redraws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "MAX_REDRAWS", tl.constexpr(redraws))
    cuts = ({"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.9999})
    samplings = [Sampling(temperature=1e4, seed=seed, **cut) for seed, cut in enumerate(cuts)]
    each, plain = noisy(samplings, [range(2)] * 3), random_logits(1, 60)
    for logits in (plain, plain.round(), plain.sign()):  # ties, too
        rows = logits.repeat(6, 1)
        assert torch.equal(each.read_fused(rows, slice(0, 6))[0], each(rows, slice(0, 6)))


def test_a_view_of_rows_is_read_in_place() -> None:
    wide = random_logits(4, 40)
    wide[:, 30:] = 50.0
    view = wide[1:3, :30]
    each = noisy([Sampling(temperature=1.0)], [range(2)])
    assert torch.equal(each.read_fused(view, slice(0, 2))[0], each(view, slice(0, 2)))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinity_are_selected(value: float, temperature: float) -> None:
    logits = random_logits(2, 9)
    logits[0, 6] = value
    each = noisy([Sampling(temperature=temperature)], [range(2)])
    assert each.read_fused(logits, slice(0, 2))[0][0] == 6


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mixture_equals_the_reference(ratio: float, temperature: float, kernels: Kernels) -> None:
    sampled = Sampling(temperature=temperature, top_p=0.9, seed=3)
    guess, logits = random_logits(3, 30), random_logits(3, 26)
    reads = [Mixture(guess=guess, ratio=ratio, sampling=sampled, step=1)]
    found = []
    for fits in (False, True):
        kernels(fits)
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
    fields: dict[str, Any], calls: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    monkeypatch.setattr(
        sampling, "read_rows", lambda *given: counted.append(given) or read_rows(*given)
    )
    logits, reads, slots = random_logits(6, 20), [Sample(**fields)] * 2, [range(3), range(2, 5)]
    kernels(False)
    plain = Sample.make_reader(reads, slots, CPU)(logits, slice(0, 6))
    kernels(True)
    found = Sample.make_reader(reads, slots, CPU)(logits, slice(0, 6))
    assert len(counted) == calls
    assert torch.equal(found.tokens, plain.tokens) and found.scores.keys() == plain.scores.keys()
    check_scores(found.scores, plain.scores)


def drafted_reads(guess: Tensor, samplings: Sequence[Sampling], seed: int = 0) -> list[Rejection]:
    drawn = torch.Generator().manual_seed(seed)
    heats = torch.tensor([each.temperature or 0.1 for each in samplings]).repeat_interleave(2)
    drafted = (guess / heats[:, None]).softmax(-1).multinomial(1, generator=drawn)
    return [
        Rejection(
            drafted=tuple(drafted.flatten()[2 * n : 2 * n + 2].tolist()),
            guess=guess[2 * n : 2 * n + 2],
            sampling=replace(each, seed=seed),
            scores=NAMES,
        )
        for n, each in enumerate(samplings)
    ]


def random_drafts(
    vocab: int, width: int, samplings: Sequence[Sampling], seed: int = 0
) -> tuple[Tensor, list[Rejection]]:
    """Return logits `[3 reads, vocab]` of a target, and reads of a similar draft."""
    drawn, count = torch.Generator().manual_seed(seed), 3 * len(samplings)
    logits = torch.randn(count, max(vocab, width), generator=drawn) * 3
    guess = logits + torch.randn(logits.shape, generator=drawn)
    guess = guess[torch.arange(count) % 3 != 2, :width]
    return logits[:, :vocab], drafted_reads(guess, samplings, seed)


def verify(reads: Sequence[Rejection], logits: Tensor, rows: slice | None = None) -> Readout:
    rows = rows or slice(0, len(logits))
    slots = [range(len(read.drafted) + 1) for read in reads]
    return Rejection.make_reader(reads, slots, CPU)(logits[rows], rows)


def check_same(found: Readout, wanted: Readout) -> None:
    """Check that tokens are equal, and scores up to rounding."""
    assert torch.equal(found.tokens, wanted.tokens)
    check_scores(found.scores, wanted.scores)


@pytest.mark.parametrize(
    ("vocab", "width", "dtype"),
    [
        (50, 60, torch.float16),
        (60, 50, torch.float32),
        *(
            pytest.param(vocab, width, dtype, marks=pytest.mark.nightly)
            for vocab, width in ((50, 60), (300, 300), (9000, 5000), (5000, 9000))
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
    ids=str,
)
def test_verified_tokens_and_scores_equal_the_reference(
    vocab: int, width: int, dtype: torch.dtype, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    if vocab > 1000:
        monkeypatch.setattr(fused, "BLOCK_COLUMNS", 4096)
    logits, reads = random_drafts(vocab, width, SAMPLINGS)
    kernels(False)
    wanted = verify(reads, logits.to(dtype).float())
    kernels(True)
    found = verify(reads, logits.to(dtype))
    check_same(found, wanted)
    drafted = torch.tensor([token for read in reads for token in (*read.drafted, -1)])
    accepted = int((found.tokens == drafted).sum())
    assert 0 < accepted < 2 * len(reads)


@pytest.mark.nightly
def test_chunks_and_views_change_nothing(kernels: Kernels) -> None:
    logits, reads = random_drafts(40, 40, FEW[1:])
    kernels(True)
    whole = verify(reads, logits)
    parts = [verify(reads, logits, slice(n, n + 4)).tokens for n in range(0, len(logits), 4)]
    assert torch.equal(torch.cat(parts), whole.tokens)
    wide = torch.full((len(logits), 50), 99.0)
    wide[:, :40] = logits
    turned = [replace(read, guess=read.guess.T.contiguous().T) for read in reads]
    check_same(verify(turned, wide[:, :40]), whole)
    check_same(verify(turned, logits.T.contiguous().T), whole)


def test_an_empty_residual_samples_the_target(kernels: Kernels) -> None:
    logits = torch.tensor([[3.0, -5.0, 2.9, 2.8]]).repeat(11, 1)
    guess = torch.cat((logits[1:], torch.full((10, 30), -1e30)), 1)
    # The first draft is outside of the distribution, the second of the vocabulary.
    sampled = Sampling(temperature=1.0, top_k=3, seed=2)
    read = Rejection(drafted=(1, 14) * 5, guess=guess, sampling=sampled)
    kernels(False)
    wanted = verify([read], logits).tokens
    kernels(True)
    found = verify([read], logits).tokens
    assert torch.equal(found, wanted) and set(found.tolist()) == {0, 2, 3}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_of_drafts_are_selected(value: float, kernels: Kernels) -> None:
    logits, reads = random_drafts(20, 20, FEW)
    logits[1::3, 6] = value
    for each in reads[::2]:
        each.guess[0, 7] = value
    kernels(False)
    wanted = verify(reads, logits).tokens
    kernels(True)
    found = verify(reads, logits).tokens
    assert torch.equal(found, wanted) and set(found[1::3].tolist()) == {6}


def test_a_method_generates_the_same_text(kernels: Kernels) -> None:
    found, method = [], Speculative(draft="near", tokens=4, verify="rejection")
    for fits in (False, True):
        kernels(fits)
        engine = new_engine()
        jobs = [
            Request(method=method, sampling=each, max_tokens=5).submit(engine) for each in FEW[1:]
        ]
        finish(engine)
        found.append([tokens(job) for job in jobs])
    assert found[0] == found[1]
