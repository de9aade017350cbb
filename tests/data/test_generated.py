"""Generated problems: correct answers, disjoint splits, fixed by index, only words of the zoo."""

import operator
import re
from collections import Counter
from collections.abc import Callable
from importlib.resources import as_file, files
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from outpace.data.generated import Problem
from outpace.data.generated.story import STORY_SPLITS, story_problems
from outpace.data.generated.sudoku import SUDOKU_SPLITS, sheet_text, sudoku_problems
from outpace.data.generated.table import OPERATION_RESULTS, TABLE_SPLITS, table_problems
from outpace.lab.scoring.planning import judge_sudoku_sheet, parse_grid
from vocabulary import SPECIAL_TOKENS, build_tokenizer, save_tokenizer, story_texts

SPLITS = {
    story_problems: STORY_SPLITS,
    sudoku_problems: SUDOKU_SPLITS,
    table_problems: TABLE_SPLITS,
}
CASES = [(problems, split) for problems, splits in SPLITS.items() for split in splits.names]
LENGTHS = {story_problems: (32, 96), sudoku_problems: (20, 83), table_problems: (24, 100)}
"""Fewest and most tokens of an answer."""

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
EQUATION = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")
COUNT = re.compile(r"Count (back )?from (\d+) by (\d) (?:down|up) to (\d+)\.")
FILL = re.compile(r"Fill the table n([-+*])(\d+) from (\d+) to (\d+)\.")
Board = list[list[int]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    with as_file(files("outpace.zoo") / "vocabulary") as folder:
        return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(("problems", "splits"), SPLITS.items())
def test_splits_share_no_question(problems: Callable[..., Any], splits: Any) -> None:
    found = {
        split: {
            text
            for problem in problems(split, 300 if split == "train" else 100)
            for text in sheet_text(problem.question).split("\n\n")
        }
        for split in splits.names
    }
    assert sum(map(len, found.values())) == len(set().union(*found.values()))
    assert all(len(questions) > 60 for questions in found.values())
    for words in ({"split": "dev"}, {"count": -1}, {"start": -1}):
        with pytest.raises(ValueError, match="dev|count|start"):
            problems(**{"split": "train", "count": 1, **words})


@pytest.mark.parametrize(("problems", "split"), CASES)
def test_prompt_and_answer_are_short_and_tokenize_separately(
    problems: Callable[..., Any], split: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    least, most = LENGTHS[problems]
    for problem in problems(split, 40):
        prompt, answer = problem.question + "\n", problem.answer + tokenizer.eos_token
        apart = tokenizer(prompt).input_ids + tokenizer(answer).input_ids
        assert apart == tokenizer(prompt + answer).input_ids
        assert tokenizer.decode(apart) == prompt + answer
        assert least <= len(tokenizer(answer).input_ids) <= most


def assert_true_equation(left: str, op: str, right: str, result: str, repeated: str) -> None:
    """Assert a correct equation within the table of small numbers."""
    x, y, z = int(left), int(right), int(result)
    assert result == repeated
    assert OPERATIONS[op](x, y) == z
    assert op != "/" or z * y == x
    assert min(x, y, z) >= 2 and max(x, y, z) <= 100


@pytest.mark.parametrize("split", STORY_SPLITS.names)
def test_stories_have_correct_equations_of_known_numbers(split: str) -> None:
    for problem in story_problems(split, 300):
        equations = EQUATION.findall(problem.answer)
        assert 2 <= len(equations) <= 4
        assert len(equations) == problem.answer.count("<<")
        known = set(re.findall(r"\d+", problem.question)) | {"2"}  # for "half", "twice"
        for equation in equations:
            assert_true_equation(*equation)
            left, _, right, result, _ = equation
            assert {left, right} <= known
            known.add(result)
        assert problem.final_result == equations[-1][3]
        assert problem.answer.endswith(f"\n#### {problem.final_result}")
        assert not re.search(r"[{}]|  |\b[01] ", problem.question + problem.answer)
        assert problem.question.endswith("?") and problem.answer[0].isupper()


def test_problems_stay_the_same() -> None:
    assert story_problems("train", 1) == [
        Problem(
            question=(
                "It costs 2 dollars to send one of the letters. Nina has 26 dollars and sends "
                "8 letters on Monday and 3 on Tuesday. How many dollars are left?"
            ),
            answer=(
                "Nina sends 8+3=<<8+3=11>>11 letters. She pays 11*2=<<11*2=22>>22 dollars. "
                "So 26-22=<<26-22=4>>4 dollars are left.\n#### 4"
            ),
        )
    ]
    puzzles = "0000\n4302\n2000\n0124\n\n0401\n3142\n0203\n0304"
    solved = "1243\n4312\n2431\n3124\n\n2431\n3142\n4213\n1324"
    assert sudoku_problems("test", 1, start=2) == [Problem(f"Solve:\n{puzzles}", solved)]
    numbers = "58 56 12 65 94 37 52 47"
    assert table_problems("test", 1, start=5) == [Problem(f"Copy: {numbers}", numbers)]


def solve_puzzle(board: Board) -> list[Board]:
    """Return all solutions, by brute force independent of the module."""
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
            found += solve_puzzle(tried)
    return found


def parse_sheet(problem: Problem) -> list[tuple[Board, Board]]:
    pairs = zip(
        map(parse_grid, sheet_text(problem.question).split("\n\n")),
        map(parse_grid, problem.answer.split("\n\n")),
        strict=True,
    )
    return [(board, solved) for board, solved in pairs if board is not None and solved is not None]


@pytest.mark.parametrize("split", SUDOKU_SPLITS.names)
def test_puzzles_have_one_solution(split: str) -> None:
    for problem in sudoku_problems(split, 60):
        pairs = parse_sheet(problem)
        assert len(pairs) == problem.answer.count("\n\n") + 1
        for board, solved in pairs:
            assert solve_puzzle(board) == [solved] != [board]


def test_sheets_are_judged_as_a_whole() -> None:
    problem = next(each for each in sudoku_problems("train", 30) if each.answer.count("\n\n") == 2)
    reference = sheet_text(problem.question)
    first, second, third = problem.answer.split("\n\n")
    spaced = problem.answer.replace("1", " 1")
    for answer in (problem.answer, f"\n{problem.answer}\n", spaced):
        assert judge_sudoku_sheet(answer, reference)
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


def solve_table(question: str) -> str:
    if found := COUNT.fullmatch(question):
        first, step, last = int(found[2]), int(found[3]), int(found[4])
        numbers = range(first, last - 1, -step) if found[1] else range(first, last + 1, step)
        return " ".join(map(str, numbers))
    if found := FILL.fullmatch(question):
        op, other = found[1], int(found[2])
        numbers = range(int(found[3]), int(found[4]) + 1)
        return "\n".join(f"{n}{op}{other}={OPERATION_RESULTS[op](n, other)}" for n in numbers)
    return question.removeprefix("Copy: ")


@pytest.mark.parametrize("split", TABLE_SPLITS.names)
def test_tables_are_correct(split: str) -> None:
    kinds = Counter()
    for problem in table_problems(split, 600):
        assert problem.answer == solve_table(problem.question) != problem.question
        numbers = [int(number) for number in re.findall(r"\d+", problem.answer)]
        assert min(numbers) >= 1 and max(numbers) <= 99
        kinds[problem.question.split()[0]] += 1
    assert set(kinds) == {"Count", "Copy:", "Fill"} and min(kinds.values()) > 120


def test_vocabulary_is_full_with_the_special_tokens_last(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert len(tokenizer) == 1024
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [1020, 1021, 1022, 1023]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 1020
    assert tokenizer.mask_token_id == 1021
    assert tokenizer.tokenize("4096") == list("4096")
    text = "Zoë — 12×3\n\t<x> 日本"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template_is_the_training_format(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "user", "content": "How many?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "How many?\n"
    chat += [{"role": "assistant", "content": "#### 2"}, {"role": "user", "content": "Why?"}]
    expected = "How many?\n#### 2<|endoftext|>\nWhy?\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == expected


def test_a_built_vocabulary_is_saved_and_loaded(tmp_path: Path) -> None:
    built = build_tokenizer(story_texts(200), vocab=300)
    save_tokenizer(built, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == 300
    assert loaded("Tom has 12 cups.").input_ids == built.encode("Tom has 12 cups.").ids
    with pytest.raises(ValueError, match="vocab=1024"):
        build_tokenizer(["too short"])
