"""Expected tokens of cycles by draft length."""

import pytest

from outpace.pacing.controller import AVERAGED_CYCLES, PRIOR, Acceptance


def test_without_a_cycle_the_prior_counts() -> None:
    acceptance = Acceptance(nested=True)
    assert acceptance.expected_tokens(1) == 1
    assert acceptance.expected_tokens(4) == pytest.approx(1 + PRIOR + PRIOR**2 + PRIOR**3)


def test_rates_are_per_position() -> None:
    acceptance = Acceptance(nested=True)
    for _ in range(200):
        acceptance.record_cycle(4, 2)
        acceptance.record_cycle(4, 3)
    expected = [acceptance.expected_tokens(value) for value in (1, 2, 3, 4)]
    assert expected == pytest.approx([1, 2, 2.5, 2.5], abs=0.05)


def test_a_change_is_followed() -> None:
    slow, quick = Acceptance(nested=True), Acceptance(nested=True)
    for each in (slow, quick):
        for _ in range(300):
            each.record_cycle(2, 1)
    quick.reset_weights()
    for _ in range(8):
        slow.record_cycle(2, 2)
        quick.record_cycle(2, 2)
    assert slow.expected_tokens(2) < 1.3 and quick.expected_tokens(2) > 1.7
    for _ in range(3 * AVERAGED_CYCLES):
        slow.record_cycle(2, 2)
    assert slow.expected_tokens(2) > 1.9


def test_windows_that_were_never_tried_are_judged_by_longer_ones() -> None:
    acceptance = Acceptance(nested=False)
    for _ in range(64):
        acceptance.record_cycle(16, 10)
        acceptance.record_cycle(1, 1)
    assert (
        acceptance.expected_tokens(8) == pytest.approx(8, rel=0.05)
        and acceptance.expected_tokens(16) > 9.5
    )
    for _ in range(64):
        acceptance.record_cycle(8, 3)
    assert acceptance.expected_tokens(8) < 4 and acceptance.expected_tokens(16) > 9.5


def test_cycles_may_commit_nothing() -> None:
    acceptance = Acceptance(nested=False)
    for _ in range(100):
        acceptance.record_cycle(4, 0)
    assert acceptance.expected_tokens(4) < 0.1
