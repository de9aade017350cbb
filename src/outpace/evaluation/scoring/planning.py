"""Plans that can be checked: Countdown and 4×4 Sudoku, judged as Dream's authors judge them."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable

OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
ARITHMETIC = re.compile(r"\d+[+\-*/]\d[\d+\-*/(). ]*", re.ASCII)
USED = re.compile(r"\d+(?=[+,\-./*=])")
SIDE, BOX = 4, 2
LONGEST = 1000
"""Characters of an equation that is still worked out."""


def countdown(answer: str, reference: str) -> bool:
    """Whether the first line is a chain of equations from the given numbers to the last of them.

    `reference` is the numbers, with commas. Every equation must hold, and every number be used
    once, results included. Unlike the published scorer nothing is executed, so that powers and
    whole division, which the task does not offer, are wrong.
    """
    *given, goal = reference.split(",")
    left = Counter(given)
    equations = answer.split("\n")[0].split(",")
    for equation in equations:
        sides = equation.split("=")
        if len(sides) != 2 or not holds(*sides):
            return False
        left.subtract(USED.findall(equation))
        left[sides[1]] += 1
    left[goal] -= 1
    return equations[-1].split("=")[-1] == goal and not any(left.values())


def holds(expression: str, result: str) -> bool:
    """Whether an expression that begins with an operation on two numbers has this value."""
    if len(expression) > LONGEST or not ARITHMETIC.fullmatch(expression):
        return False
    try:
        return value(ast.parse(expression, mode="eval").body) == float(result)
    except (ArithmeticError, RecursionError, SyntaxError, ValueError):
        return False


def value(node: ast.expr) -> float:
    """Value of a sum, difference, product or quotient; `ValueError` for anything else."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](value(left), value(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -value(operand)
        case ast.UnaryOp(ast.UAdd(), operand):
            return value(operand)
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")


def sudoku(answer: str, reference: str) -> bool:
    """Whether the first paragraph fills the puzzle: rows, columns and boxes of 1 to 4.

    `reference` is the puzzle, zeros to be filled. As published, spaces are left out, and no more
    characters are read than the puzzle has.
    """
    written = answer.split("\n\n")[0].replace(" ", "")[: len(reference)]
    puzzle, grid = rows(reference), rows(written)
    if grid is None or puzzle is None:
        return False
    kept = all(
        given in (0, filled)
        for asked, done in zip(puzzle, grid, strict=True)
        for given, filled in zip(asked, done, strict=True)
    )
    return kept and all(sorted(group) == [1, 2, 3, 4] for group in groups(grid))


def sheet(answer: str, reference: str) -> bool:
    """Whether paragraph by paragraph each fills its puzzle of a sheet, and there are no more."""
    filled, asked = answer.strip().split("\n\n"), reference.split("\n\n")
    return len(filled) == len(asked) and all(map(sudoku, filled, asked))


def rows(text: str) -> list[list[int]] | None:
    """A square of digits; None where a text is none."""
    try:
        square = [[int(digit) for digit in row] for row in text.strip().split("\n")]
    except ValueError:
        return None
    return square if [len(row) for row in square] == [SIDE] * SIDE else None


def groups(grid: list[list[int]]) -> list[list[int]]:
    """Rows, columns and boxes."""
    columns = [list(column) for column in zip(*grid, strict=True)]
    boxes = [
        [grid[top + y][left + x] for y in range(BOX) for x in range(BOX)]
        for top in range(0, SIDE, BOX)
        for left in range(0, SIDE, BOX)
    ]
    return [*grid, *columns, *boxes]
