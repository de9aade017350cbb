"""Generated problems of all kinds."""

from __future__ import annotations

from types import ModuleType

import pytest

from outpace.evaluation.generated import story, sudoku, table

KINDS = [(kind, split) for kind in (story, sudoku, table) for split in kind.SPLITS.names]


@pytest.mark.parametrize(("kind", "split"), KINDS)
def test_problems_depend_only_on_their_index(kind: ModuleType, split: str) -> None:
    """And on the seed."""
    assert kind.problems(split, 10)[6:] == kind.problems(split, 4, start=6)
    assert kind.problems(split, 10) != kind.problems(split, 10, seed=1)
