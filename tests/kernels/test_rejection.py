"""The rejection sampling kernel compared with the reference, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers import chi_square, finish, tokens
from outpace.decoding import accept, sampling
from outpace.decoding.accept import DRAFT_STEP, Rejection
from outpace.decoding.sampling import NoisyChooser, Readout
from outpace.decoding.sampling_params import Sampling
from outpace.kernels import fused
from outpace.methods import Speculative
from workload import Request, new_engine

CPU = torch.device("cpu")
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.5),
    Sampling(temperature=2.0, top_k=3),
    Sampling(temperature=1.5, min_p=0.3),
    Sampling(temperature=5.0, top_p=0.9, top_k=40, min_p=0.001),
]
NAMES = ("confidence", "entropy", "logprob", "margin")

Kernels = Callable[[bool], None]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Return a function that enables the kernels, with blocks of a few columns."""
    monkeypatch.setattr(fused, "BLOCK_COLUMNS", 64)

    def enable(fits: bool) -> None:
        for module in (sampling, accept):
            monkeypatch.setattr(module, "runs_triton", lambda device: fits)

    return enable


def reads_of(guess: Tensor, seed: int = 0) -> list[Rejection]:
    """Return a read per setting, of two drafts each, sampled from `guess [2 reads, W]`."""
    drawn = torch.Generator().manual_seed(seed)
    heats = torch.tensor([each.temperature or 0.1 for each in SAMPLINGS]).repeat_interleave(2)
    drafted = (guess / heats[:, None]).softmax(-1).multinomial(1, generator=drawn)
    return [
        Rejection(
            drafted=tuple(drafted.flatten()[2 * n : 2 * n + 2].tolist()),
            guess=guess[2 * n : 2 * n + 2],
            sampling=replace(each, seed=seed),
            scores=NAMES,
        )
        for n, each in enumerate(SAMPLINGS)
    ]


def case(vocab: int, width: int, seed: int = 0) -> tuple[Tensor, list[Rejection]]:
    """Return logits `[3 reads, vocab]` of a target, and reads of a similar draft."""
    drawn, count = torch.Generator().manual_seed(seed), 3 * len(SAMPLINGS)
    logits = torch.randn(count, max(vocab, width), generator=drawn) * 3
    guess = logits + torch.randn(logits.shape, generator=drawn)
    guess = guess[torch.arange(count) % 3 != 2, :width]
    return logits[:, :vocab], reads_of(guess, seed)


def slots_of(reads: Sequence[Rejection]) -> list[range]:
    """Return the slots of the drafts, and the next one."""
    return [range(len(read.drafted) + 1) for read in reads]


def verified(reads: Sequence[Rejection], logits: Tensor, rows: slice | None = None) -> Readout:
    """Verify some rows."""
    rows = rows or slice(0, len(logits))
    return Rejection.make_reader(reads, slots_of(reads), CPU)(logits[rows], rows)


def check_same(found: Readout, wanted: Readout) -> None:
    """Check that tokens are equal, and scores up to rounding."""
    assert torch.equal(found.tokens, wanted.tokens)
    assert found.scores.keys() == wanted.scores.keys()
    for name, expected in wanted.scores.items():
        torch.testing.assert_close(found.scores[name], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("vocab", "width", "seeds"),
    [(50, 60, 3), (60, 50, 3), (300, 300, 1), (9000, 5000, 1), (5000, 9000, 1)],
)
def test_tokens_and_scores_equal_the_reference(
    vocab: int,
    width: int,
    seeds: int,
    dtype: torch.dtype,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[bool] = []
    if vocab > 1000:
        monkeypatch.setattr(fused, "BLOCK_COLUMNS", 4096)
    for seed in range(seeds):
        logits, reads = case(vocab, width, seed)
        kernels(False)
        wanted = verified(reads, logits.to(dtype).float())
        kernels(True)
        found = verified(reads, logits.to(dtype))
        check_same(found, wanted)
        drafted = torch.tensor([token for read in reads for token in (*read.drafted, -1)])
        kept += (found.tokens == drafted)[drafted >= 0].tolist()
    assert 0.1 < sum(kept) / len(kept) < 0.8


def test_a_group_is_read_in_chunks(kernels: Kernels) -> None:
    logits, reads = case(40, 40)
    kernels(True)
    whole = verified(reads, logits).tokens
    parts = [verified(reads, logits, slice(n, n + 4)).tokens for n in range(0, len(logits), 4)]
    assert torch.equal(torch.cat(parts), whole)


def test_views_are_read_in_place(kernels: Kernels) -> None:
    logits, reads = case(40, 40)
    kernels(True)
    whole = verified(reads, logits)
    wide = torch.full((len(logits), 50), 99.0)
    wide[:, :40] = logits
    turned = [replace(read, guess=read.guess.T.contiguous().T) for read in reads]
    check_same(verified(turned, wide[:, :40]), whole)
    check_same(verified(turned, logits.T.contiguous().T), whole)


@pytest.mark.nightly
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.8, "min_p": 0.02}], ids=str)
def test_tokens_follow_the_distribution_of_the_target(
    cut: dict[str, float], kernels: Kernels
) -> None:
    count, chosen = 300, Sampling(temperature=1.3, seed=5, **cut)
    target = torch.tensor([[1.0, 0.0, 2.0, -1.0, 0.5, 1.5, -4.0, 0.0]])
    guess = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, 1.0, -1.0, 2.0]])
    each = NoisyChooser.from_requests([chosen], [DRAFT_STEP], [range(count)], CPU)
    rows = slice(0, count)
    drafted = each(guess.repeat(count, 1), rows)
    read = Rejection(drafted=tuple(drafted.tolist()), guess=guess.repeat(count, 1), sampling=chosen)
    kernels(True)
    found = verified([read], target.repeat(count + 1, 1)).tokens[:count]
    assert 0.1 < float((found == drafted).float().mean()) < 0.9
    law, other = (
        each.choice_probabilities(logits.repeat(count, 1), rows)[0] for logits in (target, guess)
    )
    assert chi_square(found, law) > 1e-3 > 1e-9 > chi_square(found, other)


def test_a_draft_of_the_same_distribution_is_accepted(kernels: Kernels) -> None:
    logits, reads = case(60, 60)
    own = logits[torch.arange(len(logits)) % 3 != 2]
    kernels(False)
    drafted = reads_of(own)
    reads = [
        replace(read, drafted=(read.drafted[0],) * 2, guess=read.guess[:1].repeat(2, 1))
        for read in drafted
    ]
    rows = torch.cat([read.guess[[0, 0, 0]] for read in reads])
    wanted = verified(reads, rows).tokens
    kernels(True)
    assert torch.equal(verified(reads, rows).tokens, wanted)


@pytest.mark.parametrize("draft", [1, 30], ids=["outside", "longer"])
def test_an_empty_residual_samples_the_target(draft: int, kernels: Kernels) -> None:
    logits = torch.tensor([[3.0, -5.0, 2.9, 2.8]]).repeat(21, 1)
    guess = torch.cat((logits[1:], torch.full((20, 30), -1e30)), 1)
    read = Rejection(
        drafted=(draft,) * 20, guess=guess, sampling=Sampling(temperature=1.0, top_k=3, seed=2)
    )
    kernels(False)
    wanted = verified([read], logits).tokens
    kernels(True)
    found = verified([read], logits).tokens
    assert torch.equal(found, wanted) and set(found.tolist()) == {0, 2, 3}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_are_selected(value: float, kernels: Kernels) -> None:
    logits, reads = case(20, 20)
    logits[1::3, 6] = value
    for read in reads[::2]:
        read.guess[0, 7] = value
    kernels(False)
    wanted = verified(reads, logits).tokens
    kernels(True)
    found = verified(reads, logits).tokens
    assert torch.equal(found, wanted) and set(found[1::3].tolist()) == {6}


def test_a_method_generates_the_same_text(kernels: Kernels) -> None:
    found, method = [], Speculative(draft="near", tokens=4, verify="rejection")
    for fits in (False, True):
        kernels(fits)
        engine = new_engine()
        jobs = [
            Request(method=method, sampling=each, max_tokens=6).submit(engine)
            for each in SAMPLINGS[:3]
        ]
        finish(engine)
        found.append([tokens(job) for job in jobs])
    assert found[0] == found[1]
