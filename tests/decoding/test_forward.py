"""`Forward`: visible slots of each row, and the rows that predict."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.decoding import CAUSAL, FULL, Forward

ROWS = [7, 7, 7, 7, 7]
PLAIN = Forward(ids=ROWS, start=10)


def test_end_is_the_slot_after_the_rows() -> None:
    assert (PLAIN.end, PLAIN.num_visible) == (15, 15)
    assert replace(PLAIN, pattern=FULL, visible_end=20).num_visible == 20


def test_causal_rows_see_up_to_themselves() -> None:
    assert PLAIN.visible_ends() == [11, 12, 13, 14, 15]


def test_full_rows_see_all_rows() -> None:
    assert replace(PLAIN, pattern=FULL).visible_ends() == [15] * 5


def test_full_rows_see_up_to_visible_end() -> None:
    assert replace(PLAIN, pattern=FULL, visible_end=20).visible_ends() == [20] * 5


def test_visible_end_is_ignored_by_causal_rows() -> None:
    reaching = replace(PLAIN, visible_end=20)
    assert reaching.visible_ends() == [11, 12, 13, 14, 15]
    assert reaching.num_visible == 15


def test_blocks_see_to_their_own_end() -> None:
    assert replace(PLAIN, pattern=(2, 3)).visible_ends() == [12, 12, 15, 15, 15]


def test_visible_end_extends_only_the_last_block() -> None:
    assert replace(PLAIN, pattern=(2, 3), visible_end=18).visible_ends() == [12, 12, 18, 18, 18]


@given(st.integers(0, 50), st.integers(1, 12))
def test_causal_is_blocks_of_one_and_full_is_one_block(start: int, rows: int) -> None:
    forward = Forward(ids=[0] * rows, start=start)
    singles, single = replace(forward, pattern=(1,) * rows), replace(forward, pattern=(rows,))
    assert forward.visible_ends() == singles.visible_ends()
    assert replace(forward, pattern=FULL).visible_ends() == single.visible_ends()


@given(st.integers(0, 50), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_a_row_sees_itself_and_never_a_later_block(start: int, lengths: list[int]) -> None:
    forward = Forward(ids=[0] * sum(lengths), start=start, pattern=tuple(lengths))
    stops = forward.visible_ends()
    first = start
    for length in lengths:
        for slot in range(first, first + length):
            assert stops[slot - start] == first + length > slot
        first += length


def test_previous_row_predicts_with_shift_one() -> None:
    assert replace(PLAIN, predict=[11, 15]).predicted_rows(shift=1) == [0, 4]


def test_own_row_predicts_without_shift() -> None:
    assert replace(PLAIN, predict=[10, 14]).predicted_rows(shift=0) == [0, 4]


def test_next_slot_is_predicted_by_default() -> None:
    assert list(PLAIN.predicted_rows(shift=1)) == [4]
    assert list(PLAIN.predicted_slots()) == [15]


def test_default_needs_shift_one() -> None:
    for shift in (0, 2):
        with pytest.raises(ValueError, match="only a model with shift 1 predicts: list the slots"):
            PLAIN.predicted_rows(shift)


def test_nothing_may_be_predicted() -> None:
    nothing = replace(PLAIN, predict=())
    assert nothing.predicted_rows(shift=1) == []
    assert list(nothing.predicted_slots()) == []


@pytest.mark.parametrize(
    ("shift", "slot", "row"), [(1, 10, 9), (1, 16, 15), (0, 9, 9), (0, 15, 15)]
)
def test_slot_without_its_row_raises(shift: int, slot: int, row: int) -> None:
    wanted = f"slot {slot} is predicted by the row of slot {row}, .* holds slots 10 to 14"
    with pytest.raises(ValueError, match=wanted):
        replace(PLAIN, predict=[11, slot]).predicted_rows(shift)


def test_predicting_rows_may_be_given() -> None:
    named = replace(PLAIN, predict=[30, 12, 12], predict_from=[14, 11, 12])
    for shift in (0, 1):
        assert named.predicted_rows(shift) == [4, 1, 2]
    assert replace(PLAIN, predict_from=[10]).predicted_rows(shift=0) == [0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([14, 15], "slot 12 is predicted by the row of slot 15, .* holds slots 10 to 14"),
        ([9, 10], "slot 30 is predicted by the row of slot 9"),
        ([14], "predict_from has 1 rows for 2 wanted slots"),
    ],
)
def test_given_rows_must_exist(rows: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, predict=[30, 12], predict_from=rows).predicted_rows(shift=1)


def check(forward: Forward, *, vocab: int = 8, slots: int = 40, written: int = 10) -> None:
    """Check a forward against a small model and memory."""
    forward.check_bounds(vocab=vocab, length=100, slots=slots, written=written)


def test_rows_may_follow_or_overwrite_written_slots() -> None:
    check(PLAIN)
    check(replace(PLAIN, start=0))
    check(replace(PLAIN, start=35), written=35)
    check(replace(PLAIN, start=3, pattern=FULL, visible_end=10))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (replace(PLAIN, ids=[]), "at least one row"),
        (replace(PLAIN, ids=[7, 8]), "token id 8 is outside the vocabulary of 8"),
        (replace(PLAIN, ids=[7, -1]), "token id -1 is outside"),
        (replace(PLAIN, start=11), "start at slot 11, but only 10 slots have been written"),
        (replace(PLAIN, start=-1), "start at slot -1"),
        (replace(PLAIN, ids=ROWS * 7), "end at slot 44, but 40 slots were reserved"),
        (
            replace(PLAIN, pattern=FULL, visible_end=16),
            "visible_end 16 has slots that were never written",
        ),
        (replace(PLAIN, positions=[1, 2]), "2 positions for 5 rows"),
        (replace(PLAIN, context=torch.zeros(0, 4)), "context is 4 wide, but target reads 0"),
        (replace(PLAIN, pattern=(2, 2)), r"block lengths \(2, 2\) do not add up to 5 rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_forward_that_cannot_run_is_refused(forward: Forward, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(forward)


def test_patterns_have_names() -> None:
    assert PLAIN.pattern == CAUSAL != FULL


def test_context_fills_the_slots_before_the_rows() -> None:
    with_features = replace(PLAIN, model="draft", context=torch.zeros(4, 6))
    assert (with_features.first_slot, with_features.start, with_features.end) == (6, 10, 15)
    assert with_features.visible_ends() == PLAIN.visible_ends()
    for written in (6, 10, 15):
        with_features.check_bounds(vocab=8, length=100, slots=40, written=written, feature_size=6)
    with pytest.raises(ValueError, match="start at slot 6, but only 5 slots have been written"):
        with_features.check_bounds(vocab=8, length=100, slots=40, written=5, feature_size=6)
    with pytest.raises(ValueError, match="start at slot -1"):
        replace(with_features, start=3).check_bounds(
            vocab=8, length=100, slots=40, written=5, feature_size=6
        )
