"""Seconds of passes by their rows."""

from __future__ import annotations

import pytest

from outpace.decoding.cost import Cost


def test_cost_is_a_line_that_never_falls() -> None:
    """And a constant where all passes had the same rows."""
    cost = Cost()
    for rows in (2, 4, 8, 16):
        cost.add(rows, 3 + rows)
    assert [cost.at(rows) for rows in (1, 5, 20)] == pytest.approx([4, 8, 23], rel=1e-3)
    falling, flat = Cost(), Cost()
    for rows in (2, 4):
        falling.add(rows, 10 - rows)
        flat.add(7, 5.0)
    assert falling.at(1) == pytest.approx(falling.at(9)) == pytest.approx(7, rel=0.01)
    assert flat.at(1) == pytest.approx(flat.at(99)) == pytest.approx(5)
