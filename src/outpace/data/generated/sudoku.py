"""Generated sheets of 4×4 Sudoku: answers that need planning, not left-to-right order.

A row is four digits, with 0 for an empty cell, as in Dream's planning data (Ye et al., 2025). A
puzzle has exactly one solution. With few given cells it is hard: the first cells in the text are
seldom the first that can be deduced.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, reduce
from itertools import permutations
from operator import and_
from random import Random

from outpace.data.generated import Problem, ProblemSplits

SUDOKU_SPLITS = ProblemSplits(("train", "test"), test_every=50)
GIVEN_COUNTS = range(4, 11)
"""Numbers of given cells; with fewer than four, no puzzle has a unique solution."""

MAX_PUZZLES_PER_SHEET = 4
"""Maximum number of puzzles of a sheet."""

QUESTION_PREFIX = "Solve:\n"
"""Beginning of a question; the sheet follows."""

GRID_SIDE = 4
GRID_CELLS = range(GRID_SIDE * GRID_SIDE)

SudokuGrid = tuple[int, ...]
"""Sixteen digits, row by row."""


def sudoku_problems(split: str, count: int, *, seed: int = 0, start: int = 0) -> list[Problem]:
    """Return problems `start` to `start + count` of a split; each depends only on its index."""
    found = []
    for rng in SUDOKU_SPLITS.random_sources(split, count, seed, start):
        sheet = [draw_puzzle(split, rng) for _ in range(rng.randint(1, MAX_PUZZLES_PER_SHEET))]
        questions, solutions = zip(*sheet, strict=True)
        found.append(Problem(QUESTION_PREFIX + format_sheet(questions), format_sheet(solutions)))
    return found


def sheet_text(question: str) -> str:
    return question.removeprefix(QUESTION_PREFIX)


def draw_puzzle(split: str, rng: Random) -> tuple[SudokuGrid, SudokuGrid]:
    """Draw a puzzle of the split and its unique solution.

    Cells are emptied in random order while the solution remains unique, until the drawn number of
    given cells is left. Orders that do not reach it are drawn again, as are puzzles of other
    splits.
    """
    givens = rng.choice(GIVEN_COUNTS)
    while True:
        solution, given = rng.choice(all_grids()), set(GRID_CELLS)
        for cell in rng.sample(GRID_CELLS, len(GRID_CELLS)):
            if len(given) > givens and solution_bits(solution, given - {cell}).bit_count() == 1:
                given.remove(cell)
        grid = tuple(solution[cell] if cell in given else 0 for cell in GRID_CELLS)
        if len(given) == givens and SUDOKU_SPLITS.contains(split, format_sheet([grid])):
            return grid, solution


def solution_bits(grid: SudokuGrid, given: Iterable[int]) -> int:
    """Return the grids that agree with one in the given cells, as bits ordered as `all_grids`."""
    return reduce(and_, (grids_by_cell()[cell, grid[cell]] for cell in given), -1)


@cache
def grids_by_cell() -> dict[tuple[int, int], int]:
    """Return, for each cell and digit, the grids with this digit there, as bits."""
    return {
        (cell, digit): sum(1 << n for n, grid in enumerate(all_grids()) if grid[cell] == digit)
        for cell in GRID_CELLS
        for digit in range(1, GRID_SIDE + 1)
    }


@cache
def all_grids() -> tuple[SudokuGrid, ...]:
    rows = tuple(permutations(range(1, GRID_SIDE + 1)))
    halves = [(*a, *b) for a in rows for b in rows if forms_boxes(a, b)]
    return tuple(
        (*top, *bottom)
        for top in halves
        for bottom in halves
        if all(
            len({top[x], top[x + GRID_SIDE], bottom[x], bottom[x + GRID_SIDE]}) == GRID_SIDE
            for x in range(GRID_SIDE)
        )
    )


def forms_boxes(upper: SudokuGrid, lower: SudokuGrid) -> bool:
    return not ({*upper[:2]} & {*lower[:2]} or {*upper[2:]} & {*lower[2:]})


def format_sheet(sheet: Iterable[SudokuGrid]) -> str:
    return "\n\n".join(
        "\n".join(
            "".join(map(str, grid[at : at + GRID_SIDE])) for at in range(0, len(grid), GRID_SIDE)
        )
        for grid in sheet
    )
