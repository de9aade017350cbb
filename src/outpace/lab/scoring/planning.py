"""Scoring of plans by checking them: Countdown and 4×4 Sudoku, as by Dream's authors."""

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
ARITHMETIC_EXPRESSION = re.compile(r"\d+[+\-*/]\d[\d+\-*/(). ]*", re.ASCII)
USED_NUMBER = re.compile(r"\d+(?=[+,\-./*=])")
SUDOKU_SIDE, SUDOKU_BOX = 4, 2
MAX_EXPRESSION_LENGTH = 1000
"""Maximum number of characters of an expression that is evaluated."""


def judge_countdown(answer: str, reference: str) -> bool:
    """Check that the first line is a chain of equations from the given numbers to the goal.

    `reference` is the numbers, separated by commas, the goal last. Every equation must hold, and
    every number, results included, must be used once. Unlike the published scorer, nothing is
    executed: powers and integer division, which the task does not offer, are wrong.
    """
    *given, goal = reference.split(",")
    unused = Counter(given)
    equations = answer.split("\n")[0].split(",")
    for equation in equations:
        sides = equation.split("=")
        if len(sides) != 2 or not equation_holds(*sides):
            return False
        unused.subtract(USED_NUMBER.findall(equation))
        unused[sides[1]] += 1
    unused[goal] -= 1
    return equations[-1].split("=")[-1] == goal and not any(unused.values())


def equation_holds(expression: str, result: str) -> bool:
    if len(expression) > MAX_EXPRESSION_LENGTH or not ARITHMETIC_EXPRESSION.fullmatch(expression):
        return False
    try:
        return evaluate_arithmetic(ast.parse(expression, mode="eval").body) == float(result)
    except (ArithmeticError, RecursionError, SyntaxError, ValueError):
        return False


def evaluate_arithmetic(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](
                evaluate_arithmetic(left), evaluate_arithmetic(right)
            )
        case ast.UnaryOp(ast.USub(), operand):
            return -evaluate_arithmetic(operand)
        case ast.UnaryOp(ast.UAdd(), operand):
            return evaluate_arithmetic(operand)
    raise ValueError(f"{ast.unparse(node)} is not arithmetic")


def judge_sudoku(answer: str, reference: str) -> bool:
    """Check that the first paragraph solves the puzzle: rows, columns and boxes of 1 to 4.

    `reference` is the puzzle, with zeros for empty cells. As published, spaces are removed, and
    only
    as many characters are read as the puzzle has.
    """
    solution = answer.split("\n\n")[0].replace(" ", "")[: len(reference)]
    puzzle, grid = parse_grid(reference), parse_grid(solution)
    if grid is None or puzzle is None:
        return False
    matches_givens = all(
        given in (0, filled)
        for puzzle_row, row in zip(puzzle, grid, strict=True)
        for given, filled in zip(puzzle_row, row, strict=True)
    )
    return matches_givens and all(sorted(group) == [1, 2, 3, 4] for group in sudoku_groups(grid))


def judge_sudoku_sheet(answer: str, reference: str) -> bool:
    """Check that each paragraph solves its puzzle of a sheet, and that there are no others."""
    solutions, puzzles = answer.strip().split("\n\n"), reference.split("\n\n")
    return len(solutions) == len(puzzles) and all(map(judge_sudoku, solutions, puzzles))


def parse_grid(text: str) -> list[list[int]] | None:
    try:
        square = [[int(digit) for digit in row] for row in text.strip().split("\n")]
    except ValueError:
        return None
    return square if [len(row) for row in square] == [SUDOKU_SIDE] * SUDOKU_SIDE else None


def sudoku_groups(grid: list[list[int]]) -> list[list[int]]:
    columns = [list(column) for column in zip(*grid, strict=True)]
    boxes = [
        [grid[top + y][left + x] for y in range(SUDOKU_BOX) for x in range(SUDOKU_BOX)]
        for top in range(0, SUDOKU_SIDE, SUDOKU_BOX)
        for left in range(0, SUDOKU_SIDE, SUDOKU_BOX)
    ]
    return [*grid, *columns, *boxes]
