"""Logits to tokens and scores: processors, distributions, filters, and noise per slot."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import chi_square
from outpace.decoding import GREEDY, Sample, Sampling
from outpace.decoding.processor import BANNED_LOGIT, MinTokens, Penalties, TokenBias
from outpace.decoding.sampling import (
    MIN_STRIDED_COLUMNS,
    argmax_tokens,
    gumbel_from_keys,
    keep_top_k,
    keep_top_p,
    nucleus_argmax,
    slot_noise_keys,
)
from refusal import refuses

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.9, 0.5, 0.0, -0.3, -0.5, -1.0, -1.2, -2.0, -4.0])
DRAWS = 24_000
LIKELY = 1e-3
NAN = float("nan")


def many(sampling: Sampling, logits: Tensor = LOGITS) -> Tensor:
    read = Sample.make_reader([Sample(sampling=sampling)], [range(DRAWS)], CPU)
    return read(logits.expand(DRAWS, -1), slice(0, DRAWS)).tokens


def law(sampling: Sampling, logits: Tensor = LOGITS) -> Tensor:
    """Return the distribution of these settings, computed by sorting."""
    logits = logits.double() / sampling.temperature
    ranked, order = logits.sort(descending=True)
    mass = ranked.softmax(-1)
    outside = mass.cumsum(-1) - mass > sampling.top_p
    outside[sampling.top_k or len(mass) :] = True
    outside |= mass < sampling.min_p * mass[0]
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
    Sampling(temperature=1.0, min_p=0.2, seed=7),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    assert chi_square(many(sampling), law(sampling)) > LIKELY


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


def test_lowest_temperature_equals_greedy() -> None:
    for cut in ({}, {"top_p": 0.9}, {"top_k": 3}):
        assert set(many(Sampling(temperature=1e-30, **cut)).tolist()) == {0}


def test_top_k_keeps_ties_and_each_row_has_its_own() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]] * 3)
    kept = keep_top_k(logits, torch.tensor([2, 1, 2**31]), 4).isfinite()
    assert kept.tolist() == [
        [True, True, True, False],
        [False, True, False, False],
        [True, True, True, True],
    ]


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
    largest = torch.tensor([354322316450070530])  # its first column is the word 2 ** 32 - 1
    assert bool(gumbel_from_keys(largest, 3).isfinite().all())
    assert abs(float(noise.mean()) - 0.57722) < 0.01
    assert abs(float(noise.var()) - np.pi**2 / 6) < 0.03


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
    only = Sample.make_reader([GREEDY, Sample(scores=("entropy",))], [[0], [0]], CPU)
    # A banned token adds nothing to the entropy.
    out = only(torch.tensor([[1.0, 1.0, -1e30]] * 2), slice(0, 2))
    assert out.scores.keys() == {"entropy"}
    assert out.scores["entropy"].tolist() == pytest.approx([np.log(2)] * 2, abs=1e-6)


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


@pytest.mark.parametrize(
    ("param", "values"),
    [
        ("temperature", [10**400, float("inf"), NAN, -0.1, 1e-38, "x", []]),
        ("top_p", [None, 0, 1.01, -1, NAN, "x", True, []]),
        ("top_k", [10**20, NAN, 0, -1, 1.5, "x", True, []]),
        ("min_p", [-0.1, 1.5, NAN, "x"]),
        ("seed", [None, "abc", NAN, -0.5, 1.5, True, []]),
    ],
)
def test_invalid_settings_are_refused(param: str, values: list[object]) -> None:
    for value in values:
        with refuses(param):
            Sampling(**{param: value})


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
