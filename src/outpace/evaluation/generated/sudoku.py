"""Sheets of 4×4 Sudoku: answers that are planned, not read off from left to right.

A row is four digits, 0 for a cell to be filled, as in Dream's planning data (Ye et al., 2025). A
puzzle has exactly one solution. Few givens make hard ones, in which the cells that come first in
the text are seldom the ones that are known first. Sheets are made without end and by seed.
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
"""How many cells of a puzzle may be given; with less than four none has one solution."""

MOST = 4
"""Puzzles of a sheet at most."""

ASKED = "Solve:\n"
"""How a question begins, which a sheet ends."""

SIDE = 4
CELLS = range(SIDE * SIDE)

Grid = tuple[int, ...]
"""Sixteen digits, row by row."""


def problems(split: str, count: int, *, seed: int = 0, start: int = 0) -> list[Problem]:
    """Problems `start` to `start + count` of a split; each depends on its index alone."""
    return [drawn(split, rng) for rng in SPLITS.sources(split, count, seed, start)]


def drawn(split: str, rng: Random) -> Problem:
    """A sheet of one to four puzzles, all of them of the split."""
    sheet = [puzzle(split, rng) for _ in range(rng.randint(1, MOST))]
    asked, solved = zip(*sheet, strict=True)
    return Problem(ASKED + written(asked), written(solved))


def sheet_of(question: str) -> str:
    """The puzzles that a question asks."""
    return question.removeprefix(ASKED)


def puzzle(split: str, rng: Random) -> tuple[Grid, Grid]:
    """A puzzle with one solution, and that; one that falls into another split is drawn again.

    Cells are emptied in random order wherever one solution is left, until as many are given as were
    drawn; where an order does not lead there, another is tried.
    """
    givens = rng.choice(GIVENS)
    while True:
        solution, given = rng.choice(grids()), set(CELLS)
        for cell in rng.sample(CELLS, len(CELLS)):
            if len(given) > givens and solutions(solution, given - {cell}).bit_count() == 1:
                given.remove(cell)
        asked = tuple(solution[cell] if cell in given else 0 for cell in CELLS)
        if len(given) == givens and SPLITS.holds(split, written([asked])):
            return asked, solution


def solutions(grid: Grid, given: Iterable[int]) -> int:
    """Which grids agree with one in the given cells, as bits in the order of `grids`."""
    return reduce(and_, (agreeing()[cell, grid[cell]] for cell in given), -1)


@cache
def agreeing() -> dict[tuple[int, int], int]:
    """For each cell and digit the grids that have it there, as bits."""
    return {
        (cell, digit): sum(1 << n for n, grid in enumerate(grids()) if grid[cell] == digit)
        for cell in CELLS
        for digit in range(1, SIDE + 1)
    }


@cache
def grids() -> tuple[Grid, ...]:
    """All 288 grids whose rows, columns and boxes hold the digits from 1 to 4."""
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
    """Whether two rows make two boxes."""
    return not ({*upper[:2]} & {*lower[:2]} or {*upper[2:]} & {*lower[2:]})


def written(sheet: Iterable[Grid]) -> str:
    """Grids as lines of four digits, with an empty line between two of them."""
    return "\n\n".join(
        "\n".join("".join(map(str, grid[at : at + SIDE])) for at in range(0, len(grid), SIDE))
        for grid in sheet
    )
