"""Seconds of passes by their rows."""

import pytest

from outpace.pacing.cost import OUTLIER_FACTOR, PassCost


def cost_of(*passes: tuple[int, float]) -> PassCost:
    """Return the cost after these passes, the first of each length a slow one."""
    cost, seen = PassCost(), set[int]()
    for rows, seconds in passes:
        if rows not in seen:
            cost.record_pass(rows, 3 * seconds)
        cost.record_pass(rows, seconds)
        seen.add(rows)
    return cost


def test_cost_is_interpolated() -> None:
    cost = cost_of((2, 5.0), (4, 7.0), (16, 19.0))
    assert [cost.seconds_at(rows) for rows in (1, 2, 3, 10, 16, 64)] == pytest.approx(
        [2.5, 5, 6, 13, 19, 76]
    )
    assert [cost.covers(rows) for rows in (1, 2, 3, 16, 18, 24)] == [False, *[True] * 4, False]
    assert cost.seconds_per_row == pytest.approx(19 / 16)


def test_more_rows_never_take_less() -> None:
    cost = cost_of((2, 8.0), (4, 6.0), (8, 9.0))
    assert [cost.seconds_at(rows) for rows in (2, 3, 4, 8)] == pytest.approx([6, 6, 6, 9])


def test_outliers_count_little() -> None:
    assert cost_of((8, 90.0), (8, 10.0), (8, 90.0)).seconds_at(8) == 10
    assert cost_of(*[(8, 10.0)] * 9, (8, 1e9)).seconds_at(8) == pytest.approx(
        10 * (10 + OUTLIER_FACTOR) / 11
    )
    assert cost_of((4, 7.0)).is_cold is cost_of((4, 7.0)).as_prior().is_cold is False
    once = PassCost()
    once.record_pass(100, 1000.0)
    assert once.is_cold and not once.covers(100) and once.seconds_per_row == 10
    once.record_pass(2, 5.0)
    once.record_pass(2, 5.0)
    assert (once.seconds_at(2), once.seconds_at(100), once.is_cold) == (5, 250, False)


def test_priors_are_scaled_by_measured_passes() -> None:
    cost = PassCost(prior={1: (1, 1.0), 4: (4, 2.0), 16: (16, 3.0)})
    for seconds in (40.0, 12.0, 10.0, 20.0, 20.0, 30.0):
        cost.record_pass(4, seconds)
    (level,) = cost.prior_levels
    cost.set_level(level)
    assert level == pytest.approx(cost.seconds_at(4) / 2) and level > 5
    assert [cost.seconds_at(rows) for rows in (1, 16)] == pytest.approx([level, 3 * level])
    assert cost.least_points == {1: (1, level), 4: (4, 10.0), 16: (16, 3 * level)}


def test_only_few_rows_are_padded() -> None:
    cost = cost_of((1, 5.0), (12, 9.0), (32, 10.0), (96, 42.0))
    assert [cost.least_seconds_at(rows) for rows in (8, 64)] == pytest.approx([5, 26])


def test_costs_that_change_are_followed() -> None:
    cost = cost_of(*[(8, 10.0)] * 200, *[(8, 15.0)] * 300)
    assert cost.seconds_at(8) == pytest.approx(15, rel=0.02)
