"""Generated problems of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outpace.evaluation.generated import story, sudoku, table

SPLITS = {
    story.story_problems: story.STORY_SPLITS,
    sudoku.sudoku_problems: sudoku.SUDOKU_SPLITS,
    table.table_problems: table.TABLE_SPLITS,
}
CASES = [(problems, split) for problems, splits in SPLITS.items() for split in splits.names]


@pytest.mark.parametrize(("problems", "split"), CASES)
def test_problems_depend_only_on_their_index(problems: Callable[..., Any], split: str) -> None:
    assert problems(split, 10)[6:] == problems(split, 4, start=6)
    assert problems(split, 10) != problems(split, 10, seed=1)
