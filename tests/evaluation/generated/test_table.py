"""Generated tables: correct answers, disjoint splits, only words of the zoo."""

from __future__ import annotations

import re
from collections import Counter
from importlib.resources import as_file, files

import pytest
from transformers import AutoTokenizer

from outpace.evaluation.generated.problems import Problem
from outpace.evaluation.generated.table import OPERATION_RESULTS, TABLE_SPLITS, table_problems

COUNT = re.compile(r"Count (back )?from (\d+) by (\d) (?:down|up) to (\d+)\.")
FILL = re.compile(r"Fill the table n([-+*])(\d+) from (\d+) to (\d+)\.")


def solved(question: str) -> str:
    """The answer to a question."""
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
def test_answers_are_correct(split: str) -> None:
    for problem in table_problems(split, 1000):
        assert problem.answer == solved(problem.question) != problem.question


@pytest.mark.parametrize("split", TABLE_SPLITS.names)
def test_numbers_have_one_or_two_digits(split: str) -> None:
    for problem in table_problems(split, 1000):
        numbers = [int(number) for number in re.findall(r"\d+", problem.answer)]
        assert min(numbers) >= 1 and max(numbers) <= 99


def test_kinds_are_uniform() -> None:
    kinds = Counter(problem.question.split()[0] for problem in table_problems("train", 3000))
    assert set(kinds) == {"Count", "Copy:", "Fill"}
    assert min(kinds.values()) > 800


def test_splits_share_no_question() -> None:
    train = {problem.question for problem in table_problems("train", 20_000)}
    test = {problem.question for problem in table_problems("test", 500)}
    assert not train & test
    assert len(test) > 250


def test_problems_stay_the_same() -> None:
    numbers = "58 56 12 65 94 37 52 47"
    assert table_problems("test", 1, start=5) == [Problem(f"Copy: {numbers}", numbers)]


def test_prompts_and_answers_are_short() -> None:
    with as_file(files("outpace.zoo") / "vocabulary") as folder:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    for split in TABLE_SPLITS.names:
        for problem in table_problems(split, 300):
            prompt, answer = problem.question + "\n", problem.answer + tokenizer.eos_token
            apart = tokenizer(prompt).input_ids + tokenizer(answer).input_ids
            assert apart == tokenizer(prompt + answer).input_ids
            assert len(apart) <= 127
            assert 24 <= len(tokenizer(answer).input_ids) <= 100


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="'unseen': choose one of train, test"):
        table_problems("unseen", 1)
    with pytest.raises(ValueError, match="negative"):
        table_problems("train", -1)
