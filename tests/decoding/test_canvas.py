"""Canvas: what is fed, what is empty, what is filled."""

from __future__ import annotations

import pytest

from outpace.decoding import Canvas


def test_holes_are_fed_as_masks_and_filled_in_any_order() -> None:
    canvas = Canvas([1, 9], mask_id=9)
    assert (len(canvas), canvas.filled, canvas.holes) == (2, 2, [])
    canvas.extend(4)
    assert canvas.ids == [1, 9, 9, 9, 9, 9]
    canvas.fill([4, 2], [6, 7])
    assert canvas.ids == [1, 9, 7, 9, 6, 9]
    assert canvas.holes == [3, 5]
    assert canvas.filled == 3
    canvas.fill([3, 5], [8, 8])
    assert canvas.filled == len(canvas) == 6


def test_holes_of_a_part() -> None:
    canvas = Canvas([], mask_id=0)
    canvas.extend(8)
    canvas.fill([3, 5], [1, 1])
    assert canvas.within(2, 6) == [2, 4]
    assert canvas.within(3, 4) == []
    assert canvas.within(6, 99) == [6, 7]


def test_known_slots_are_those_that_are_no_holes() -> None:
    canvas = Canvas([9, 1], mask_id=9)
    canvas.extend(4)
    canvas.fill([4], [9])
    assert canvas.known(0) == [0, 1, 4]
    assert canvas.known(1) == [1, 4]
    assert canvas.known(5) == []


@pytest.mark.parametrize("slot", [0, 3, 9])
def test_what_is_no_hole_is_not_filled(slot: int) -> None:
    canvas = Canvas([1], mask_id=0)
    canvas.extend(3)
    canvas.fill([3], [5])
    with pytest.raises(ValueError, match=rf"slot {slot} is no hole; the holes are \[1, 2\]"):
        canvas.fill([slot], [7])
    assert canvas.ids == [1, 0, 0, 5]
