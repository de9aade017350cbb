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

from outpace.evaluation.generated.problems import Problem, Splits

SPLITS = Splits(("train", "test"), test_every=50)
GIVENS = range(4, 11)
"""Numbers of given cells; with fewer than four, no puzzle has a unique solution."""

MOST = 4
"""Maximum number of puzzles of a sheet."""

ASKED = "Solve:\n"
"""Beginning of a question; the sheet follows."""

SIDE = 4
CELLS = range(SIDE * SIDE)

Grid = tuple[int, ...]
"""Sixteen digits, row by row."""


def problems(split: str, count: int, *, seed: int = 0, start: int = 0) -> list[Problem]:
    """Return problems `start` to `start + count` of a split; each depends only on its index."""
    return [drawn(split, rng) for rng in SPLITS.sources(split, count, seed, start)]


def drawn(split: str, rng: Random) -> Problem:
    """Draw a sheet of one to four puzzles, all of the split."""
    sheet = [puzzle(split, rng) for _ in range(rng.randint(1, MOST))]
    questions, solutions = zip(*sheet, strict=True)
    return Problem(ASKED + written(questions), written(solutions))


def sheet_of(question: str) -> str:
    """Return the sheet of a question."""
    return question.removeprefix(ASKED)


def puzzle(split: str, rng: Random) -> tuple[Grid, Grid]:
    """Draw a puzzle of the split and its unique solution.

    Cells are emptied in random order while the solution remains unique, until the drawn number of
    given cells is left. Orders that do not reach it are drawn again, as are puzzles of other
    splits.
    """
    givens = rng.choice(GIVENS)
    while True:
        solution, given = rng.choice(grids()), set(CELLS)
        for cell in rng.sample(CELLS, len(CELLS)):
            if len(given) > givens and solutions(solution, given - {cell}).bit_count() == 1:
                given.remove(cell)
        grid = tuple(solution[cell] if cell in given else 0 for cell in CELLS)
        if len(given) == givens and SPLITS.holds(split, written([grid])):
            return grid, solution


def solutions(grid: Grid, given: Iterable[int]) -> int:
    """Return the grids that agree with one in the given cells, as bits ordered as `all_grids`."""
    return reduce(and_, (agreeing()[cell, grid[cell]] for cell in given), -1)


@cache
def agreeing() -> dict[tuple[int, int], int]:
    """Return, for each cell and digit, the grids with this digit there, as bits."""
    return {
        (cell, digit): sum(1 << n for n, grid in enumerate(grids()) if grid[cell] == digit)
        for cell in CELLS
        for digit in range(1, SIDE + 1)
    }


@cache
def grids() -> tuple[Grid, ...]:
    """Return all 288 grids whose rows, columns and boxes contain the digits 1 to 4."""
    rows = tuple(permutations(range(1, SIDE + 1)))
    halves = [(*a, *b) for a in rows for b in rows if fits(a, b)]
    return tuple(
        (*top, *bottom)
        for top in halves
        for bottom in halves
        if all(
            len({top[x], top[x + SIDE], bottom[x], bottom[x + SIDE]}) == SIDE for x in range(SIDE)
        )
    )


def fits(upper: Grid, lower: Grid) -> bool:
    """Return whether two rows form two valid boxes."""
    return not ({*upper[:2]} & {*lower[:2]} or {*upper[2:]} & {*lower[2:]})


def written(sheet: Iterable[Grid]) -> str:
    """Return grids as lines of four digits, separated by empty lines."""
    return "\n\n".join(
        "\n".join("".join(map(str, grid[at : at + SIDE])) for at in range(0, len(grid), SIDE))
        for grid in sheet
    )
