"""Expected tokens of cycles by draft length."""

from __future__ import annotations

import pytest

from outpace.pacing.acceptance import MEMORY, PRIOR, Acceptance


def test_without_a_cycle_the_prior_counts() -> None:
    """One certain token, and each draft with the prior's rate."""
    acceptance = Acceptance(nested=True)
    assert acceptance.tokens(1) == 1
    assert acceptance.tokens(4) == pytest.approx(1 + PRIOR + PRIOR**2 + PRIOR**3)


def test_rates_are_per_position() -> None:
    """First drafts are always accepted, second ones in every other cycle, third ones never."""
    acceptance = Acceptance(nested=True)
    for _ in range(200):
        acceptance.add(4, 2)
        acceptance.add(4, 3)
    expected = [acceptance.tokens(value) for value in (1, 2, 3, 4)]
    assert expected == pytest.approx([1, 2, 2.5, 2.5], abs=0.05)


def test_a_change_is_followed() -> None:
    """Within a few times the averaged cycles; immediately after a reset."""
    slow, quick = Acceptance(nested=True), Acceptance(nested=True)
    for each in (slow, quick):
        for _ in range(300):
            each.add(2, 1)
    quick.renew()
    for _ in range(8):
        slow.add(2, 2)
        quick.add(2, 2)
    assert slow.tokens(2) < 1.3 and quick.tokens(2) > 1.7
    for _ in range(3 * MEMORY):
        slow.add(2, 2)
    assert slow.tokens(2) > 1.9


def test_windows_that_were_never_tried_are_judged_by_longer_ones() -> None:
    """Even if a shorter one is nearer, which has no data on further tokens."""
    acceptance = Acceptance(nested=False)
    for _ in range(64):
        acceptance.add(16, 10)
        acceptance.add(1, 1)
    assert acceptance.tokens(8) == pytest.approx(8, rel=0.05) and acceptance.tokens(16) > 9.5
    for _ in range(64):
        acceptance.add(8, 3)
    assert acceptance.tokens(8) < 4 and acceptance.tokens(16) > 9.5


def test_cycles_may_commit_nothing() -> None:
    """As in a window whose first hole stays open."""
    acceptance = Acceptance(nested=False)
    for _ in range(100):
        acceptance.add(4, 0)
    assert acceptance.tokens(4) < 0.1
