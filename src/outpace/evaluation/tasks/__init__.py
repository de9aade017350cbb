"""Evaluation tasks by name."""

import re
from functools import partial

from outpace.evaluation.generated import story, sudoku, table
from outpace.evaluation.scoring.expressions import last_boxed
from outpace.evaluation.scoring.numbers import STRICT, final
from outpace.evaluation.tasks.task import Made, Published, Task
from outpace.jsonl import Record


def number(record: Record) -> str | None:
    """Return the number after `#### ` of a worked answer."""
    number_match = STRICT.search(record["answer"])
    return number_match[1].replace(",", "").removesuffix(".") if number_match else None


def expression(record: Record) -> str | None:
    """Return the answer of a line, or else the boxed result of its solution."""
    answer = record.get("answer")
    return answer if isinstance(answer, str) and answer else last_boxed(record["solution"])


def puzzle(record: Record) -> str:
    """Return the puzzle: a plan is checked, not compared."""
    return record["input"]


def whole(record: Record) -> Record:
    """Return the whole line."""
    return record


def pattern(record: Record) -> str | None:
    """Return the answer of a line if it is a regular expression."""
    try:
        re.compile(record["answer"])
    except (re.error, OverflowError, RecursionError):
        return None
    return record["answer"]


OWN = "own-"
"""Prefix of the tasks that read a user's own lines; the name of a judge follows."""

own = partial(Published, file="JSON lines of question and answer", texts=("question", "answer"))

TASKS: dict[str, Task] = {
    "countdown": Published(file="cd4_test.jsonl", texts=("input", "output"), reference=puzzle),
    "gsm8k": Published(file="test.jsonl of GSM8K", texts=("question", "answer"), reference=number),
    "humaneval": Published(
        file="HumanEval.jsonl.gz",
        texts=("prompt", "test", "entry_point"),
        reference=whole,
    ),
    "math500": Published(
        file="test.jsonl of MATH-500", texts=("problem", "solution"), reference=expression
    ),
    "mbpp": Published(
        file="mbpp.jsonl", texts=("text", "code"), lists=("test_list",), reference=whole
    ),
    "mtbench": Published(
        file="question.jsonl of MT-Bench", texts=(), lists=("turns",), reference=whole
    ),
    "own-exact": own(reference=lambda line: line["answer"].strip() or None),
    "own-number": own(reference=lambda line: final(line["answer"]), wanted="a number"),
    "own-regex": own(reference=pattern, wanted="a regular expression"),
    "story": Made(problems=partial(story.problems, "test"), reference=lambda line: line["final"]),
    "story-unseen": Made(
        problems=partial(story.problems, "unseen"), reference=lambda line: line["final"]
    ),
    "sudoku": Published(file="sudoku_4x4_10.jsonl", texts=("input", "output"), reference=puzzle),
    "sudoku-sheet": Made(
        problems=partial(sudoku.problems, "test"),
        reference=lambda line: sudoku.sheet_of(line["question"]),
    ),
    "table": Made(problems=partial(table.problems, "test"), reference=lambda line: line["answer"]),
}

JUDGES = tuple(name.removeprefix(OWN) for name in TASKS if name.startswith(OWN))
"""Scoring rules for a user's own lines."""

__all__ = ["JUDGES", "OWN", "TASKS", "Task"]
