"""Logits to tokens and scores: distributions, filters, and noise independent of the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import chi_square
from outpace.decoding import GREEDY, Sample, Sampling
from outpace.decoding.argmax import MIN_STRIDED_COLUMNS, argmax_tokens
from outpace.decoding.noise import gumbel_from_keys
from outpace.decoding.sampling import slot_noise_keys
from outpace.decoding.truncation import LogitTruncation, keep_top_k, keep_top_p, nucleus_argmax

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.9, 0.5, 0.0, -0.3, -0.5, -1.0, -1.2, -2.0, -4.0])
DRAWS = 24_000
LIKELY = 1e-3


def draw(
    logits: Tensor, sampling: Sampling, slots: range, *, step: int = 0, chunk: int = 10**6
) -> Tensor:
    """Return tokens that one request draws from logits `[r, V]` of these slots."""
    read = Sample.make_reader([Sample(sampling=sampling, step=step)], [slots], CPU)
    rows = [slice(i, min(i + chunk, len(slots))) for i in range(0, len(slots), chunk)]
    return torch.cat([read(logits[part], part).tokens for part in rows])


def many(sampling: Sampling, logits: Tensor = LOGITS) -> Tensor:
    """Draw from the same logits at many slots."""
    return draw(logits.expand(DRAWS, -1), sampling, range(DRAWS))


def law(sampling: Sampling, logits: Tensor = LOGITS) -> Tensor:
    """Return the distribution of these settings, computed by sorting."""
    logits = logits.double() / sampling.temperature
    ranked, order = logits.sort(descending=True)
    mass = ranked.softmax(-1)
    outside = mass.cumsum(-1) - mass > sampling.top_p
    outside[sampling.top_k or len(mass) :] = True
    mass[outside] = 0
    return torch.zeros_like(mass).scatter(-1, order, mass / mass.sum())


SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, seed=1),
    Sampling(temperature=2.0, seed=2),
    Sampling(temperature=1.0, top_p=0.7, seed=3),
    Sampling(temperature=0.8, top_p=0.9, seed=4),
    Sampling(temperature=1.0, top_k=4, seed=5),
    Sampling(temperature=1.3, top_k=6, top_p=0.8, seed=6),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    assert chi_square(many(sampling), law(sampling)) > LIKELY


@pytest.mark.parametrize(
    ("drawn", "wrong"),
    [
        (Sampling(temperature=1.0), Sampling(temperature=1.1)),
        (Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.97)),
        (Sampling(temperature=1.0, top_p=0.7), Sampling(temperature=1.0, top_p=0.8)),
        (Sampling(temperature=1.0, top_k=4), Sampling(temperature=1.0, top_k=5)),
        (Sampling(temperature=0.6), Sampling(temperature=0.36)),
    ],
    ids=str,
)
def test_chi_square_detects_a_wrong_distribution(drawn: Sampling, wrong: Sampling) -> None:
    assert chi_square(many(drawn), law(wrong)) < LIKELY


def test_distribution_holds_over_seeds_and_steps() -> None:
    half = Sampling(temperature=1.0, top_p=0.9)
    seeds = [Sample(sampling=Sampling(temperature=1.0, top_p=0.9, seed=s)) for s in range(DRAWS)]
    steps = [Sample(sampling=half, step=step) for step in range(DRAWS)]
    logits = LOGITS.expand(DRAWS, -1)
    for reads in (seeds, steps):
        read = Sample.make_reader(reads, [[17]] * DRAWS, CPU)
        assert chi_square(read(logits, slice(0, DRAWS)).tokens, law(half)) > LIKELY


def test_draws_of_neighbouring_slots_are_independent() -> None:
    fair = torch.zeros(4)
    tokens = many(Sampling(temperature=1.0), fair)
    pairs = tokens[::2] * 4 + tokens[1::2]
    assert chi_square(pairs, torch.full((16,), 1 / 16)) > LIKELY


def test_zero_temperature_takes_the_most_probable() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0]])
    read = Sample.make_reader([GREEDY], [[4, 5]], CPU)
    assert read(logits, slice(0, 2)).tokens.tolist() == [1, 0]


@pytest.mark.parametrize(
    "columns", [5, MIN_STRIDED_COLUMNS - 1, MIN_STRIDED_COLUMNS, MIN_STRIDED_COLUMNS + 1]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_argmax_equals_torch(columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(columns)
    wide = torch.randn(40, columns + 3).to(dtype)
    wide[:8] = wide[:8].round()  # many are equal
    wide[8:12] = -torch.inf
    wide[9, columns - 1] = wide[10, columns // 2] = 1.0
    wide[12, [columns // 3, columns - 2]] = torch.nan
    wide[13, 4] = wide[14, columns - 1] = torch.inf
    wide[:, columns:] = 9.0  # beyond the slice
    for logits in (wide[:, :columns], wide[:, :columns].contiguous(), wide[:1, :columns]):
        assert torch.equal(argmax_tokens(logits), logits.argmax(-1))


def test_low_temperature_equals_greedy() -> None:
    logits = torch.randn(200, 12, generator=torch.Generator().manual_seed(0))
    for temperature in (1e-4, 1e-30):
        for cut in ({}, {"top_p": 0.9}, {"top_k": 3}):
            cold = draw(logits, Sampling(temperature=temperature, **cut), range(200))
            assert torch.equal(cold, logits.argmax(-1))


rows = st.lists(st.integers(-30, 30), min_size=2, max_size=20, unique=True)


@given(rows, st.integers(1, 25))
def test_top_k_keeps_the_k_largest(values: list[int], k: int) -> None:
    logits = torch.tensor([values]) / 8
    kept = keep_top_k(logits, torch.tensor([k]), min(k, len(values)))
    largest = set(sorted(values, reverse=True)[:k])
    expected = [v / 8 if v in largest else -np.inf for v in values]
    assert kept[0].tolist() == expected


def test_top_k_keeps_ties_and_each_row_has_its_own() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]] * 3)
    kept = keep_top_k(logits, torch.tensor([2, 1, 2**31]), 4).isfinite()
    assert kept.tolist() == [
        [True, True, True, False],
        [False, True, False, False],
        [True, True, True, True],
    ]


@given(rows, st.integers(1, 100), st.integers(0, 2**32))
@settings(max_examples=200)
def test_nucleus_equals_sorting(values: list[int], percent: int, seed: int) -> None:
    logits, top_p = torch.tensor([values]) / 8, percent / 100
    noised = logits + gumbel_from_keys(torch.tensor([seed]), len(values))
    ranked, order = logits.double().sort(descending=True)
    mass = ranked.softmax(-1)
    above = mass.cumsum(-1) - mass

    def best(edge: float) -> int:
        inside = torch.zeros(1, len(values), dtype=torch.bool).scatter(-1, order, above <= edge)
        return int(noised.masked_fill(~inside, -torch.inf).argmax())

    # Where a sum meets the bound to the last bit, both results are correct.
    chosen = int(nucleus_argmax(logits, noised, torch.tensor([top_p])))
    assert chosen in {best(top_p - 1e-6), best(top_p + 1e-6)}


def test_nucleus_keeps_the_token_that_crosses_the_edge() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    noised = torch.tensor([[0.0, 1.0, 2.0]])
    assert int(nucleus_argmax(logits, noised, torch.tensor([0.6]))) == 1
    assert int(nucleus_argmax(logits, noised, torch.tensor([0.4]))) == 0
    assert int(nucleus_argmax(logits, noised, torch.tensor([1.0]))) == 2


def test_tokens_that_hold_top_p_exactly_do_not_close_the_nucleus() -> None:
    chances, top_p = torch.tensor([[0.5, 0.25, 0.125, 0.125]]), torch.tensor([0.5])
    logits = chances.log()
    assert torch.equal(logits.softmax(-1), chances)
    noised = torch.tensor([[0.0, 2.0, 1.0, 1.0]])
    assert int(nucleus_argmax(logits, noised, top_p)) == 1
    assert keep_top_p(logits, top_p).isfinite().tolist() == [[True, True, False, False]]


@given(st.integers(0, 2**32), st.floats(0.01, 30), st.integers(1, 100))
def test_wide_nucleus_equals_sorting(seed: int, spread: float, percent: int) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(seed)) * spread
    logits[1] *= 20
    kept = keep_top_p(logits, torch.full((3,), percent / 100)).isfinite()
    ranked, order = logits.double().sort(descending=True)
    above = ranked.softmax(-1).cumsum(-1) - ranked.softmax(-1)
    for row in range(3):
        least, most = (int((above[row] <= percent / 100 + e).sum()) for e in (-1e-5, 1e-5))
        inside = kept[row].nonzero().squeeze(-1).tolist()
        assert max(least, 1) <= len(inside) <= max(most, 1)
        assert set(inside) == set(order[row, : len(inside)].tolist())


settings_of_a_request = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.5]),
    top_p=st.sampled_from([0.5, 0.9, 1.0]),
    top_k=st.sampled_from([None, 1, 3, 50]),
    seed=st.integers(-5, 2**40),
)
requests = st.lists(
    st.tuples(settings_of_a_request, st.integers(0, 60), st.integers(0, 9), st.integers(0, 4)),
    min_size=1,
    max_size=6,
)


@given(requests, st.integers(1, 7))
def test_neighbours_and_chunks_change_no_draw(batch: list[tuple], chunk: int) -> None:
    slots = [range(first, first + count) for _, first, count, _ in batch]
    reads = [Sample(sampling=sampling, step=step) for sampling, *_, step in batch]
    total = sum(map(len, slots))
    logits = torch.randn(total, 12, generator=torch.Generator().manual_seed(0))
    read = Sample.make_reader(reads, slots, CPU)
    parts = [slice(i, min(i + chunk, total)) for i in range(0, total, chunk)]
    together = [token for part in parts for token in read(logits[part], part).tokens.tolist()]
    alone, first = [], 0
    for (sampling, *_, step), wanted in zip(batch, slots, strict=True):
        own = logits[first : first + len(wanted)]
        alone += draw(own, sampling, wanted, step=step).tolist() if len(wanted) else []
        first += len(wanted)
    assert together == alone


@given(st.integers(0, 10**6), st.integers(0, 1000), st.integers(0, 1000))
def test_seed_step_and_slot_all_change_the_noise(seed: int, step: int, slot: int) -> None:
    def keys(seed: int, step: int, slots: list[int]) -> list[int]:
        return slot_noise_keys([Sampling(seed=seed)], [step], [slots]).tolist()

    key = keys(seed, step, [slot])
    assert key == keys(seed, step, [slot + 1, slot])[1:]
    others = (
        keys(seed + 1, step, [slot]),
        keys(seed, step + 1, [slot]),
        keys(seed, step, [slot + 1]),
    )
    assert all(key != other for other in others)


@given(st.integers(0, 61), st.integers(0, 2**62 - 1))
def test_every_bit_of_a_key_changes_its_noise(bit: int, key: int) -> None:
    noise, other = gumbel_from_keys(torch.tensor([key, key ^ (1 << bit)]), 12)
    assert int((noise == other).sum()) <= 1


def test_noise_of_a_column_does_not_depend_on_the_vocabulary() -> None:
    keys = slot_noise_keys([Sampling(seed=1)], [2], [range(50)])
    assert torch.equal(gumbel_from_keys(keys, 30), gumbel_from_keys(keys, 40)[:, :30])


def test_noise_is_finite_and_of_the_right_size() -> None:
    keys = slot_noise_keys([Sampling()], [0], [range(2000)])
    noise = gumbel_from_keys(keys, 100).double()
    assert bool(noise.isfinite().all())
    assert abs(float(noise.mean()) - 0.57722) < 0.01
    assert abs(float(noise.var()) - np.pi**2 / 6) < 0.03


def test_noise_is_finite_at_the_largest_of_all_words() -> None:
    key = torch.tensor([354322316450070530])  # its first column is the word 2 ** 32 - 1
    assert bool(gumbel_from_keys(key, 3).isfinite().all())


def test_scores_are_those_of_the_raw_logits() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log() + 3
    read = Sample(
        sampling=Sampling(temperature=0.5, top_k=1), scores=("confidence", "entropy", "margin")
    )
    out = Sample.make_reader([read], [[0, 1]], CPU)(logits, slice(0, 2))
    assert out.tokens.tolist() == [0, 2]
    entropy = [-sum(p * np.log(p) for p in row) for row in ([0.5, 0.3, 0.2], [0.1, 0.1, 0.8])]
    assert out.scores["confidence"].tolist() == pytest.approx([0.5, 0.8], abs=1e-5)
    assert out.scores["entropy"].tolist() == pytest.approx(entropy, abs=1e-5)
    assert out.scores["margin"].tolist() == pytest.approx([0.2, 0.7], abs=1e-5)


@pytest.mark.parametrize("sampling", [*SAMPLINGS, Sampling(top_k=3), Sampling(top_p=0.5)], ids=str)
def test_drawn_scores_use_the_sampling_distribution(sampling: Sampling) -> None:
    expected = law(replace(sampling, temperature=sampling.temperature or 1.0))
    read = Sample(
        sampling=sampling, score_as_drawn=True, scores=("confidence", "entropy", "margin")
    )
    raw = Sample(scores=("confidence",))
    readout = Sample.make_reader([read, raw], [[7], [8]], CPU)(LOGITS.repeat(2, 1), slice(0, 2))
    token = int(readout.tokens[0])
    kept = expected[expected > 0]
    best = expected.topk(2).values
    assert float(readout.scores["confidence"][0]) == pytest.approx(float(expected[token]), abs=1e-6)
    assert float(readout.scores["entropy"][0]) == pytest.approx(
        float(-(kept * kept.log()).sum()), abs=1e-5
    )
    assert float(readout.scores["margin"][0]) == pytest.approx(float(best[0] - best[1]), abs=1e-6)
    assert float(readout.scores["confidence"][1]) == pytest.approx(
        float(LOGITS.double().softmax(-1).max()), abs=1e-6
    )


def test_row_without_truncation_keeps_its_tail() -> None:
    logits = torch.randn(20, 40, generator=torch.Generator().manual_seed(0)).exp() * 2
    cut = LogitTruncation.from_requests([Sampling(top_p=0.5), *[Sampling()] * 19], [[0]] * 20, CPU)
    kept = cut(logits, slice(0, 20)).isfinite().sum(-1)
    assert kept[0] < 40 and kept[1:].tolist() == [40] * 19


def test_entropy_counts_impossible_tokens_as_nothing() -> None:
    read = Sample.make_reader([Sample(scores=("entropy",))], [[0]], CPU)
    out = read(torch.tensor([[1.0, 1.0, -1e30]]), slice(0, 1))
    assert float(out.scores["entropy"][0]) == pytest.approx(np.log(2), abs=1e-6)


def test_only_requested_scores_are_computed() -> None:
    read = Sample.make_reader([GREEDY, Sample(scores=("margin",))], [[0], [0]], CPU)
    assert set(read(torch.zeros(2, 5), slice(0, 2)).scores) == {"margin"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature .* got -0.1"),
        ({"temperature": 1e-38}, "temperature .* got 1e-38"),
        ({"temperature": float("inf")}, "temperature .* got inf"),
        ({"temperature": float("nan")}, "temperature .* got nan"),
        ({"top_p": 0.0}, "top_p .* got 0.0"),
        ({"top_p": 1.01}, "top_p .* got 1.01"),
        ({"top_k": 0}, "top_k .* got 0"),
    ],
)
def test_invalid_settings_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, True),
        ({"temperature": 1.0, "seed": 3}, True),
        ({"temperature": 0.5}, False),
        ({"top_p": 0.9}, False),
        ({"top_k": 3}, False),
    ],
)
def test_plain_settings_sample_the_model_distribution(options: dict, plain: bool) -> None:
    assert Sampling(**options).is_plain == plain
