"""`Forward`: visible slots of each row, the rows that predict, and draft trees as patterns."""

from dataclasses import replace

import pytest
import torch

from outpace.decoding import CAUSAL, FULL, Forward, Tree
from outpace.decoding.forward import Pattern

ROWS = [7, 7, 7, 7, 7]
PLAIN = Forward(ids=ROWS, start=10)
BRANCHED = Forward(ids=[1, 2, 3, 4], start=5, pattern=Tree(7, (0, 1)))


def check(forward: Forward, **changes) -> None:
    sizes = {"vocab": 8, "length": 100, "slots": 40, "written": 10}
    forward.check_bounds(**sizes | changes)


@pytest.mark.parametrize(
    ("pattern", "visible_end", "ends"),
    [
        (CAUSAL, None, [11, 12, 13, 14, 15]),
        (CAUSAL, 20, [11, 12, 13, 14, 15]),
        ((1, 1, 1, 1, 1), None, [11, 12, 13, 14, 15]),
        (FULL, None, [15] * 5),
        (FULL, 20, [20] * 5),
        ((5,), None, [15] * 5),
        ((2, 3), None, [12, 12, 15, 15, 15]),
        ((2, 3), 18, [12, 12, 18, 18, 18]),
        (Tree(12, (0, 1, 3)), None, [11, 12, 12, 12, 12]),
    ],
)
def test_rows_see_up_to_an_end(pattern: Pattern, visible_end: int | None, ends: list[int]) -> None:
    forward = replace(PLAIN, pattern=pattern, visible_end=visible_end)
    assert forward.visible_ends() == ends
    assert forward.end == 15
    assert forward.num_visible == (15 if isinstance(pattern, Tree) else ends[-1])


def test_rows_before_the_root_are_causal() -> None:
    tree = Tree.from_parents(7, [-1, 0, 0, 2, -1])
    assert tree.ancestor_masks == (0b0, 0b1, 0b1, 0b101, 0b0)
    assert Tree.from_parents(7, [-1, 0, 1, 2]).ancestor_masks == (0, 0b1, 0b11, 0b111)
    assert tree.visible_ends(5) == [6, 7, 7, 7, 7, 7, 7]
    assert tree.positions(5) == [5, 6, 7, 8, 8, 9, 7]
    assert Tree(4, (0b11, 0b101)).positions(8) == [6, 6]
    check(BRANCHED)
    check(replace(BRANCHED, ids=[1, 2], start=8, pattern=Tree(4, (0b11, 0b101))))
    deep = Tree.from_parents(0, range(-1, 63))
    check(replace(BRANCHED, ids=[1] * 64, start=0, pattern=deep), slots=64)


def test_tree_rows_are_not_merged_into_the_text() -> None:
    assert BRANCHED.merge_text([9] * 9) == [9] * 5 + [1, 2, 3, 4]
    assert replace(BRANCHED, branches=[[1]]).merge_text([9] * 7) == [9] * 7
    moved = replace(PLAIN, ids=[1, 2, 3], start=1, positions=[1, 3, 2])
    assert moved.merge_text([9] * 5) == [9, 1, 3, 2, 9]


@pytest.mark.parametrize(
    ("shift", "predict", "predict_from", "rows"),
    [
        (1, [11, 15], None, [0, 4]),
        (0, [10, 14], None, [0, 4]),
        (1, None, None, [4]),
        (1, (), None, []),
        (0, [30, 12, 12], [14, 11, 12], [4, 1, 2]),
        (1, [30, 12, 12], [14, 11, 12], [4, 1, 2]),
        (0, None, [10], [0]),
    ],
)
def test_rows_that_predict(shift: int, predict, predict_from, rows: list[int]) -> None:
    forward = replace(PLAIN, predict=predict, predict_from=predict_from)
    assert list(forward.predicted_rows(shift)) == rows
    assert list(forward.predicted_slots()) == ([15] if predict is None else list(predict))


@pytest.mark.parametrize(
    ("shift", "predict", "predict_from", "named"),
    [
        (0, None, None, "predict"),
        (1, [11, 10], None, "slot 9"),
        (1, range(11, 17), None, "slot 15"),
        (0, [9], None, "slot 9"),
        (0, [15], None, "slot 15"),
        (1, [30, 12], [14, 15], "slot 15"),
        (1, [30, 12], [9, 10], "slot 9"),
        (1, [30, 12], [14], "predict_from"),
    ],
)
def test_predicting_rows_must_exist(shift: int, predict, predict_from, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(PLAIN, predict=predict, predict_from=predict_from).predicted_rows(shift)


def test_rows_may_follow_or_overwrite_written_slots() -> None:
    check(PLAIN)
    check(replace(PLAIN, start=0))
    check(replace(PLAIN, start=35), written=35)
    check(replace(PLAIN, start=3, pattern=FULL, visible_end=10))


@pytest.mark.parametrize(
    ("forward", "named"),
    [
        (replace(PLAIN, ids=[]), "row"),
        (replace(PLAIN, ids=[7, 8]), "token id 8"),
        (replace(PLAIN, ids=[7, -1]), "token id -1"),
        (replace(PLAIN, start=11), "slot 11"),
        (replace(PLAIN, start=-1), "slot -1"),
        (replace(PLAIN, ids=ROWS * 7), "slot 44"),
        (replace(PLAIN, pattern=FULL, visible_end=16), "visible_end 16"),
        (replace(PLAIN, pattern=FULL, visible_end=12), "visible_end 12"),
        (replace(PLAIN, positions=[1, 2]), "positions"),
        (replace(PLAIN, positions=[1, 2, 3, 4, 100]), "position 100"),
        (replace(PLAIN, context=torch.zeros(0, 4)), "context"),
        (replace(PLAIN, features=torch.zeros(5, 3)), "features"),
        (replace(PLAIN, pattern=(2, 2)), "block lengths"),
        (replace(PLAIN, pattern=[2, 3]), "pattern"),
        (replace(PLAIN, read="greedy"), "read"),
        (replace(BRANCHED, pattern=Tree(7, (0, 1, 1))), "root slot 7"),
        (replace(BRANCHED, pattern=Tree(9, ())), "root slot 9"),
        (replace(BRANCHED, pattern=Tree(-1, (0, 0, 0, 0))), "root slot -1"),
        (replace(BRANCHED, pattern=Tree(7, (0, 4))), "slot 8"),
        (replace(BRANCHED, pattern=Tree(7, (8, 1))), "slot 7"),
        (replace(BRANCHED, pattern=Tree(7, (0, -1))), "slot 8"),
        (replace(BRANCHED, visible_end=9), "visible_end"),
        (replace(BRANCHED, predict=[8], branches=[[], []]), "branches"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_forward_that_cannot_run_is_refused(forward: Forward, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check(forward)


@pytest.mark.parametrize("features", [None, torch.zeros(3, 6), torch.zeros(4, 5)])
def test_features_match_rows_and_width(features: torch.Tensor | None) -> None:
    forward = replace(BRANCHED, features=torch.zeros(4, 6), model="draft")
    check(forward, widths=(6, 2))
    with pytest.raises(ValueError, match="features"):
        check(replace(forward, features=features), widths=(6, 2))


def test_context_fills_the_slots_before_the_rows() -> None:
    with_features = replace(PLAIN, model="draft", context=torch.zeros(4, 6))
    assert (with_features.first_slot, with_features.start, with_features.end) == (6, 10, 15)
    assert with_features.visible_ends() == PLAIN.visible_ends()
    for written in (6, 10, 15):
        check(with_features, written=written, feature_size=6)
    with pytest.raises(ValueError, match="slot 6"):
        check(with_features, written=5, feature_size=6)
    with pytest.raises(ValueError, match="slot -1"):
        check(replace(with_features, start=3), written=5, feature_size=6)
