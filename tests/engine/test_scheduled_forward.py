"""Scheduled forwards: checked, split, and independent of their method."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import VOCAB, causal_model, engine_of, feeds, runner
from outpace.decoding import FULL, Forward
from outpace.engine.pack import ScheduledForward

ENGINE = engine_of(("causal", causal_model(vocab_size=VOCAB + 100)), slots=512)


def feed_of(forward: Forward, written: int = 100) -> ScheduledForward:
    """Return a scheduled forward of a causal model."""
    target = runner(ENGINE, "causal")
    table = target.reserve(160)
    assert table is not None
    table.written = written
    try:
        return feeds(target, [forward], [table])[0]
    finally:
        target.release(table)


@given(st.integers(1, 12), st.booleans(), st.data())
def test_split_forward_is_equal_in_two_parts(rows: int, moved: bool, data: st.DataObject) -> None:
    ids = list(range(rows))
    places = [2 * row + 5 for row in ids] if moved else None
    wanted = sorted(data.draw(st.sets(st.integers(4, 3 + rows), max_size=3)))
    whole = feed_of(Forward(ids=ids, start=3, positions=places, predict=wanted))
    cut = min(data.draw(st.integers(1, 12)), whole.splittable_rows)
    assert 0 <= cut < rows
    assert not wanted or cut <= wanted[0] - 4
    if cut:
        head, tail = whole.split_at(cut)
        assert head.ids + tail.ids == ids
        assert (head.start, head.end, tail.end) == (3, tail.start, whole.end)
        assert (head.num_visible, tail.num_visible) == (head.end, whole.num_visible)
        assert places is None or [*head.positions, *tail.positions] == places
        assert list(head.slots) == head.rows == [] and list(tail.slots) == wanted
        assert [tail.start + row for row in tail.rows] == [slot - 1 for slot in wanted]


def test_forwards_are_split_where_no_row_sees_across() -> None:
    def parts(most: int, **change: Any) -> int:
        return feed_of(Forward(ids=[1] * 6, start=3, **change)).find_split(most)

    assert [parts(most) for most in (0, 1, 5, 9)] == [0, 1, 5, 5]
    assert [parts(most, pattern=(2, 3, 1)) for most in (1, 2, 4, 9)] == [0, 2, 2, 5]
    assert parts(9, pattern=(2, 3, 1), predict=[7]) == 2
    assert parts(9, pattern=(4, 2), predict=[6]) == parts(9, pattern=FULL) == 0


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 2), st.data())
def test_split_blocks_keep_their_view(blocks: list[int], more: int, data: st.DataObject) -> None:
    reach = 3 + sum(blocks) + more if more else None
    forward = Forward(ids=[1] * sum(blocks), start=3, pattern=tuple(blocks), visible_end=reach)
    whole = feed_of(forward)
    if not whole.splittable_rows:
        return
    cut = data.draw(st.integers(1, whole.splittable_rows))
    head, tail = whole.split_at(cut)
    assert tail.visible_ends() == whole.visible_ends()[cut:] and len(tail.ids) == sum(tail.pattern)
    if apart := whole.find_split(cut):
        head, tail = whole.split_at(apart)
        assert head.visible_ends() + tail.visible_ends() == whole.visible_ends()
        assert head.num_visible == head.end


def test_holes_are_runs_of_masks_after_committed_tokens() -> None:
    feed = feed_of(Forward(ids=[9, 1, 9, 9, 2, 9], start=4))
    assert feed.mask_runs(9, 0) == (range(4, 5), range(6, 8), range(9, 10))
    assert feed.mask_runs(9, 7) == (range(7, 8), range(9, 10))
    assert feed.mask_runs(9, 10) == feed.mask_runs(8, 0) == ()
    moved = feed_of(Forward(ids=[1, 2, 9, 9], start=4, positions=[4, 6, 5, 7]))
    assert moved.mask_runs(9, 0) == (range(5, 6), range(7, 8))


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": 1.5},
        {"ids": [1.0, 2]},
        {"ids": [None]},
        {"predict": [2.5]},
        {"positions": ["a"]},
        {"pattern": "diagonal"},
        {"pattern": (1.0,)},
        {"pattern": FULL, "visible_end": 2.5},
        {"read": 5},
    ],
    ids=str,
)
def test_invalid_forwards_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        feed_of(Forward(**{"ids": [1], "start": 1, **wrong}))
