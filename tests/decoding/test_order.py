"""Orders, schedules and rules: the chosen holes, their order, and ties."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import chi_square
from outpace.decoding import Prediction, Sample
from outpace.decoding.forward import FloatArray
from outpace.decoding.order import (
    above_threshold,
    perturb_scores,
    rank_descending,
    rank_scores,
    reaching_threshold,
    select_block_holes,
    slot_uniforms,
    step_schedule,
    timestep_counts,
    timestep_shares,
    top_holes,
    within_budget,
    within_factor,
)

SCORES = np.array([0.2, 0.9, 0.5, 0.9], dtype=np.float32)
PLAIN = Sample(scores=("confidence",))


def numbers(*values: float) -> FloatArray:
    return np.array(values, dtype=np.float32)


def test_the_left_one_of_equals_comes_first() -> None:
    assert rank_descending(SCORES).tolist() == [1, 3, 2, 0]
    assert top_holes(SCORES).tolist() == [1]
    assert top_holes(SCORES, 3).tolist() == [1, 3, 2]
    assert sorted(top_holes(SCORES, 9)) == [0, 1, 2, 3]


def test_thresholds() -> None:
    assert above_threshold(SCORES, 0.5).tolist() == [1, 3]
    assert above_threshold(SCORES, 0.9).tolist() == []
    assert reaching_threshold(SCORES, 0.95).tolist() == [1]
    assert reaching_threshold(SCORES, 0.9).tolist() == [1, 3]
    assert reaching_threshold(SCORES, 0.5).tolist() == [1, 3, 2]
    assert reaching_threshold(numbers(1.0, 1.0, 0.2), 1.0).tolist() == [0, 1]


def test_rank_prefers_low_entropy() -> None:
    out = Prediction(tokens=[1, 2], scores={"confidence": SCORES[:2], "entropy": SCORES[2:]})
    assert rank_scores(out, "confidence").tolist() == SCORES[:2].tolist()
    assert rank_descending(rank_scores(out, "entropy")).tolist() == [0, 1]


def test_factor_demands_more_of_larger_groups() -> None:
    sure = numbers(0.5, 0.7, 0.1, 0.8, 0.1)
    # The second best must reach 1 - f / 3, the third 1 - f / 4.
    assert within_factor(sure, 0.8).tolist() == [3]
    assert within_factor(sure, 0.95).tolist() == [3, 1]
    assert within_factor(sure, 1.9).tolist() == [3, 1]
    assert within_factor(sure, 2.1).tolist() == [3, 1, 0]
    # A single remaining hole is filled too.
    assert within_factor(numbers(0.9, 0.1), 0.5).tolist() == [0, 1]
    assert within_factor(numbers(0.9), 0.5).tolist() == [0]


def test_budget_counts_all_entropies_but_the_largest() -> None:
    entropy = numbers(0.3, 0.1, 2.0, 0.2)
    assert within_budget(-entropy, entropy, 0.0).tolist() == [1]
    assert within_budget(-entropy, entropy, 0.11).tolist() == [1, 3]
    assert within_budget(-entropy, entropy, 0.31).tolist() == [1, 3, 0]
    assert within_budget(-entropy, entropy, 0.61).tolist() == [1, 3, 0, 2]
    # In another order: 2.0 comes first, and is the largest, which is not counted.
    assert within_budget(entropy, entropy, 0.31).tolist() == [2, 0]


entropies = st.lists(st.floats(0, 8, width=32), min_size=1, max_size=40).map(
    lambda values: np.array(values, dtype=np.float32)
)


@given(entropies, st.floats(0, 5))
def test_budget_is_respected_and_used(entropy: np.ndarray, budget: float) -> None:
    order, chosen = rank_descending(-entropy), within_budget(-entropy, entropy, budget)
    assert len(chosen) >= 1 and chosen.tolist() == order[: len(chosen)].tolist()
    taken = entropy[chosen].astype(np.float64)
    assert taken.sum() - taken.max() <= budget + 1e-4
    if len(chosen) < len(order):
        assert entropy[order[: len(chosen)]].astype(np.float64).sum() >= budget - 1e-4


def test_uniforms_are_a_function_of_seed_step_and_slot() -> None:
    whole = slot_uniforms(3, 2, range(1000))
    assert np.array_equal(slot_uniforms(3, 2, [7, 500, 8]), whole[[7, 500, 8]])
    assert not np.isin(slot_uniforms(4, 2, range(1000)), whole).any()
    assert not np.isin(slot_uniforms(3, 1, range(1000)), whole).all()
    assert 0 < whole.min() < 0.01 and 0.99 < whole.max() < 1
    assert abs(whole.mean() - 0.5) < 0.03


def test_perturbed_scores_draw_holes_by_their_weight() -> None:
    scores, temperature = np.array([-0.1, -0.4, -1.0, -0.2], dtype=np.float32), 0.3
    law = torch.tensor(scores / temperature).double().softmax(-1)
    drawn = [
        int(top_holes(perturb_scores(scores, temperature, slot_uniforms(seed, 0, range(4))))[0])
        for seed in range(4000)
    ]
    assert chi_square(torch.tensor(drawn), law) > 1e-3


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([1e-5, 1e-3, 0.05, 0.5]))
def test_counts_of_timesteps_add_up(holes: int, steps: int, eps: float) -> None:
    counts = timestep_counts(holes, steps, eps)
    assert (len(counts), sum(counts)) == (steps, holes)
    assert min(counts) >= 0
    assert [count for count, _ in step_schedule(holes, steps, eps)] == counts
    falls = timestep_shares(steps, eps)
    assert falls[-1] == 1 and (falls > 0).all() and (np.diff(falls[:-1]) >= -1e-6).all()


@pytest.mark.parametrize("steps", [1, 2, 7, 64])
def test_even_share_is_one_over_remaining_steps(steps: int) -> None:
    expected = [1 / (steps - step) for step in range(steps)]
    assert np.allclose(timestep_shares(steps, 0.0), expected, rtol=1e-5)
    assert [share for _, share in step_schedule(10, steps, 0.0)] == pytest.approx(
        expected, rel=1e-5
    )


def test_confident_holes_of_a_block_are_filled_together() -> None:
    confidence, ranks = numbers(0.5, 0.91, 0.95, 0.9), numbers(9, 8, 1, 7)
    for active in (False, True):
        assert select_block_holes(confidence, ranks, 0.9, is_active=active).tolist() == [1, 2]


def test_active_block_fills_best_hole() -> None:
    confidence, ranks = numbers(0.5, 0.6, 0.4, 0.4), numbers(1, 2, 3, 3)
    assert select_block_holes(confidence, ranks, 0.9, is_active=True).tolist() == [2]
    assert select_block_holes(confidence, ranks, 0.9, is_active=False).tolist() == []
    assert select_block_holes(numbers(), numbers(), 0.9, is_active=True).tolist() == []
