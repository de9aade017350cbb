"""Generated Sudoku sheets: unique solutions, disjoint splits, only words of the zoo."""

from __future__ import annotations

from collections import Counter
from importlib.resources import as_file, files
from itertools import product
from random import Random

import pytest
from transformers import AutoTokenizer

from outpace.evaluation.generated.problems import Problem
from outpace.evaluation.generated.sudoku import (
    GIVEN_COUNTS,
    MAX_PUZZLES_PER_SHEET,
    SUDOKU_SPLITS,
    all_grids,
    draw_puzzle,
    sheet_text,
    sudoku_problems,
)
from outpace.evaluation.scoring.planning import judge_sudoku_sheet, parse_grid

Board = list[list[int]]


def fillings(board: Board) -> list[Board]:
    """All solutions of a board, by brute force independent of the module."""
    empty = [(y, x) for y, x in product(range(4), repeat=2) if board[y][x] == 0]
    if not empty:
        return [board]
    y, x = empty[0]
    found = []
    for digit in range(1, 5):
        seen = [*board[y], *(row[x] for row in board)]
        seen += [board[y // 2 * 2 + i][x // 2 * 2 + j] for i, j in product(range(2), repeat=2)]
        if digit not in seen:
            tried = [list(row) for row in board]
            tried[y][x] = digit
            found += fillings(tried)
    return found


def puzzles(problem: Problem) -> list[tuple[Board, Board]]:
    """Puzzles and solutions of a sheet."""
    asked, answered = sheet_text(problem.question).split("\n\n"), problem.answer.split("\n\n")
    found = []
    for question, answer in zip(asked, answered, strict=True):
        board, solved = parse_grid(question), parse_grid(answer)
        assert board is not None and solved is not None
        found.append((board, solved))
    return found


def puzzles_of(made: list[Problem]) -> list[str]:
    """All puzzles of the sheets, in order."""
    return [text for problem in made for text in sheet_text(problem.question).split("\n\n")]


def test_grids_are_complete() -> None:
    tried = fillings([[0] * 4 for _ in range(4)])
    assert sorted(all_grids()) == sorted(tuple(sum(board, [])) for board in tried)
    assert len(all_grids()) == 288


@pytest.mark.parametrize("split", SUDOKU_SPLITS.names)
def test_solutions_are_unique(split: str) -> None:
    for problem in sudoku_problems(split, 100):
        for board, solved in puzzles(problem):
            assert fillings(board) == [solved] != [board]


def test_sizes_are_uniform() -> None:
    sheets = [puzzles(problem) for problem in sudoku_problems("train", 2000)]
    sizes = Counter(map(len, sheets))
    assert set(sizes) == set(range(1, MAX_PUZZLES_PER_SHEET + 1)) and min(sizes.values()) > 400
    givens = Counter(
        sum(cell > 0 for row in board for cell in row) for sheet in sheets for board, _ in sheet
    )
    assert set(givens) == set(GIVEN_COUNTS) and min(givens.values()) > 600


def test_splits_share_no_puzzle() -> None:
    train = puzzles_of(sudoku_problems("train", 5000))
    test = puzzles_of(sudoku_problems("test", 100))
    assert not set(train) & set(test)
    assert len(set(test)) > 0.9 * len(test)


def test_problems_stay_the_same() -> None:
    asked = "0000\n4302\n2000\n0124\n\n0401\n3142\n0203\n0304"
    solved = "1243\n4312\n2431\n3124\n\n2431\n3142\n4213\n1324"
    assert sudoku_problems("test", 1, start=2) == [Problem(f"Solve:\n{asked}", solved)]


def test_prompts_and_answers_are_short() -> None:
    with as_file(files("outpace.zoo") / "vocabulary") as folder:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    lengths = set()
    for problem in sudoku_problems("train", 300):
        prompt, answer = problem.question + "\n", problem.answer + tokenizer.eos_token
        apart = tokenizer(prompt).input_ids + tokenizer(answer).input_ids
        assert apart == tokenizer(prompt + answer).input_ids
        lengths.add(len(tokenizer(answer).input_ids))
    assert lengths == {20, 41, 62, 83}


def test_sheets_are_judged_as_a_whole() -> None:
    problem = next(each for each in sudoku_problems("train", 30) if each.answer.count("\n\n") == 2)
    reference = sheet_text(problem.question)
    first, second, third = problem.answer.split("\n\n")
    assert judge_sudoku_sheet(problem.answer, reference) and judge_sudoku_sheet(
        f"\n{problem.answer}\n", reference
    )
    assert judge_sudoku_sheet(problem.answer.replace("1", " 1"), reference)
    wrong = third.translate(str.maketrans("12", "21"))
    for answer in (
        "",
        first,
        reference,
        f"{second}\n\n{first}\n\n{third}",
        f"{first}\n\n{second}\n\n{wrong}",
        f"{problem.answer}\n\n{first}",
        problem.answer.replace("\n\n", "\n"),
    ):
        assert not judge_sudoku_sheet(answer, reference)


def test_hard_puzzles_occur() -> None:
    rng = Random(0)
    fewest = min(sum(cell > 0 for cell in draw_puzzle("train", rng)[0]) for _ in range(50))
    assert fewest == 4


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="'unseen': choose one of train, test"):
        sudoku_problems("unseen", 1)
    with pytest.raises(ValueError, match="negative"):
        sudoku_problems("train", -1)
