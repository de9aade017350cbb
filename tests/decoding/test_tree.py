"""Draft trees as patterns: visible slots, positions, and invalid trees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outpace.decoding import Forward, Tree

PLAIN = Forward(ids=[1, 2, 3, 4], start=5, pattern=Tree(7, (0, 1)), features=None)


def check(forward: Forward, **options) -> None:
    """Check a forward against a small model and memory."""
    forward.check_bounds(**{"vocab": 8, "length": 99, "slots": 20, "written": 9} | options)


def test_rows_before_the_root_are_causal() -> None:
    tree = Tree.from_parents(7, [-1, 0, 0, 2, -1])
    assert tree.ancestor_masks == (0b0, 0b1, 0b1, 0b101, 0b0)
    assert tree.visible_ends(5) == [6, 7, 7, 7, 7, 7, 7]
    assert tree.positions(5) == [5, 6, 7, 8, 8, 9, 7]
    assert PLAIN.visible_ends() == [6, 7, 7, 7] and PLAIN.num_visible == 9
    check(PLAIN)
    assert Tree(4, (0b11, 0b101)).positions(8) == [6, 6]
    check(replace(PLAIN, ids=[1, 2], start=8, pattern=Tree(4, (0b11, 0b101))))
    check(
        replace(PLAIN, ids=[1] * 64, start=0, pattern=Tree.from_parents(0, range(-1, 63))), slots=64
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pattern": Tree(7, (0, 1, 1))},
            "a tree of 3 rows with root slot 7 does not match 4 rows from",
        ),
        ({"pattern": Tree(9, ())}, "a tree of 0 rows with root slot 9"),
        ({"pattern": Tree(-1, (0, 0, 0, 0))}, "root slot -1"),
        (
            {"pattern": Tree(7, (0, 4))},
            "the row of slot 8 must point at the 2 slots from root slot 7",
        ),
        ({"pattern": Tree(7, (8, 1))}, "the row of slot 7 must point at the 2"),
        ({"pattern": Tree(7, (0, -1))}, "the row of slot 8 must point at the 2"),
        ({"ids": [1], "start": 70, "pattern": Tree(0, (1 << 63,))}, "the row of slot 70"),
        ({"visible_end": 9}, "visible_end must be None for a tree, got 9"),
        ({"features": torch.zeros(4, 3)}, r"features are \(4, 3\) for 4 rows, .* needs none"),
        ({"predict": [8], "branches": [[], []]}, "2 branches for 1 wanted slots"),
    ],
)
def test_invalid_trees_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(replace(PLAIN, **changes), slots=99, written=90)


@pytest.mark.parametrize("features", [None, torch.zeros(3, 6), torch.zeros(4, 5)])
def test_features_match_rows_and_width(features: torch.Tensor | None) -> None:
    forward = replace(PLAIN, features=torch.zeros(4, 6), model="draft")
    check(forward, widths=(6, 2))
    with pytest.raises(ValueError, match="for 4 rows, but draft needs 6 or 2"):
        check(replace(forward, features=features), widths=(6, 2))


def test_tree_rows_are_not_merged_into_the_text() -> None:
    assert PLAIN.merge_text([9] * 9) == [9] * 5 + [1, 2, 3, 4]
    assert replace(PLAIN, branches=[[1]]).merge_text([9] * 7) == [9] * 7
