"""Scoring rules on real answers, compared with the published scorers."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outpace.lab import sandbox
from outpace.lab.scoring import SCORERS

ANSWERS = json.loads((Path(__file__).parent / "answers.json").read_text())
"""Answers as models write them, each with its verdict: letters of the rules that accept it."""

NUMBERS = {"s": "strict", "f": "flexible", "l": "last-number"}
HUMANEVAL = {"h": "humaneval", "c": "humaneval-completion"}
MBPP = {"f": "mbpp", "d": "mbpp-done"}
INSTALLATION = "pip install '.[evaluate]'"


def pairs(table: dict[str, list[list[Any]]]) -> list[tuple[str, str, Any]]:
    """Reference, answer and verdict of each line."""
    return [(reference, *line) for reference, lines in table.items() for line in lines]


def judged(rules: dict[str, str], answer: str, reference: Any) -> str:
    return "".join(letter for letter in rules if SCORERS[rules[letter]](answer, reference))


@pytest.mark.parametrize(("reference", "answer", "right"), pairs(ANSWERS["numbers"]))
def test_numbers(reference: str, answer: str, right: str) -> None:
    assert judged(NUMBERS, answer, reference) == right
    extraction = pytest.importorskip("lm_eval.filters.extraction", reason=INSTALLATION)
    metrics = pytest.importorskip("lm_eval.api.metrics", reason=INSTALLATION)
    filters = {
        "s": extraction.RegexFilter(r"#### (\-?[0-9\.\,]+)"),
        "f": extraction.RegexFilter(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", group_select=-1),
    }
    ignored = [",", r"\$", "(?s).*#### ", r"\.$"]
    for letter, each in filters.items():
        (found,) = each.apply([[answer]], [{}])
        matched = metrics.exact_match_hf_evaluate(
            found, [reference], regexes_to_ignore=ignored, ignore_case=True
        )
        assert bool(matched["exact_match"]) is (letter in right)


@pytest.mark.parametrize(("reference", "answer", "right"), pairs(ANSWERS["expressions"]))
def test_expressions(reference: str, answer: str, right: str) -> None:
    pytest.importorskip("math_verify", reason=INSTALLATION)
    assert SCORERS["equal"](answer, f"\\boxed{{{reference}}}") is ("e" in right)


def test_expressions_are_compared_in_the_main_thread_only() -> None:
    pytest.importorskip("math_verify", reason=INSTALLATION)
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="thread"):
        pool.submit(SCORERS["equal"], "\\boxed{1}", "1").result()


@pytest.mark.parametrize(("reference", "answer", "right"), pairs(ANSWERS["countdown"]))
def test_countdown(reference: str, answer: str, right: bool) -> None:
    assert SCORERS["countdown"](answer, reference) is right


@pytest.mark.parametrize(
    "answer", ["1+2**3=9", "1+9**9**9**9=0", "1+__import__('os').getpid()=2", "1+" + "(" * 999]
)
def test_countdown_executes_nothing(answer: str) -> None:
    assert SCORERS["countdown"](answer, "1,2,3,9") is False


@pytest.mark.parametrize(("reference", "answer", "right"), pairs(ANSWERS["sudoku"]))
def test_sudoku(reference: str, answer: str, right: bool) -> None:
    assert SCORERS["sudoku"](answer, reference) is right


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("task", "rules"), [("humaneval", HUMANEVAL), ("mbpp", MBPP)])
def test_programs(
    task: str, rules: dict[str, str], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 5.0)
    reference, answers = ANSWERS[task]["reference"], ANSWERS[task]["answers"][::step]
    assert not {a: right for a, right in answers if judged(rules, a, reference) != right}


def test_tables_are_compared_exactly() -> None:
    right = [" 1 2 3\n", "1 2 3"]
    wrong = ["1 2", "1 2 3 4", "1  2 3", ""]
    assert [SCORERS["exact"](answer, "1 2 3") for answer in right + wrong] == [True] * 2 + [
        False
    ] * 4
