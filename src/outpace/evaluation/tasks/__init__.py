"""Evaluation tasks by name."""

import re
from functools import partial

from outpace.evaluation.generated import story, sudoku, table
from outpace.evaluation.scoring.expressions import last_boxed
from outpace.evaluation.scoring.numbers import STRICT_NUMBER, final_number
from outpace.evaluation.tasks.task import GeneratedTask, PublishedTask, Task
from outpace.jsonl import JsonRecord


def worked_result(record: JsonRecord) -> str | None:
    """Return the number after `#### ` of a worked answer."""
    number_match = STRICT_NUMBER.search(record["answer"])
    return number_match[1].replace(",", "").removesuffix(".") if number_match else None


def boxed_result(record: JsonRecord) -> str | None:
    """Return the answer of a line, or else the boxed result of its solution."""
    answer = record.get("answer")
    return answer if isinstance(answer, str) and answer else last_boxed(record["solution"])


def puzzle_input(record: JsonRecord) -> str:
    """Return the puzzle: a plan is checked, not compared."""
    return record["input"]


def whole_record(record: JsonRecord) -> JsonRecord:
    """Return the whole line."""
    return record


def answer_pattern(record: JsonRecord) -> str | None:
    """Return the answer of a line if it is a regular expression."""
    try:
        re.compile(record["answer"])
    except (re.error, OverflowError, RecursionError):
        return None
    return record["answer"]


OWN = "own-"
"""Prefix of the tasks that read a user's own lines; the name of a judge follows."""

own_task = partial(
    PublishedTask, file="JSON lines of question and answer", texts=("question", "answer")
)

TASKS: dict[str, Task] = {
    "countdown": PublishedTask(
        file="cd4_test.jsonl", texts=("input", "output"), reference=puzzle_input
    ),
    "gsm8k": PublishedTask(
        file="test.jsonl of GSM8K", texts=("question", "answer"), reference=worked_result
    ),
    "humaneval": PublishedTask(
        file="HumanEval.jsonl.gz",
        texts=("prompt", "test", "entry_point"),
        reference=whole_record,
    ),
    "math500": PublishedTask(
        file="test.jsonl of MATH-500", texts=("problem", "solution"), reference=boxed_result
    ),
    "mbpp": PublishedTask(
        file="mbpp.jsonl", texts=("text", "code"), lists=("test_list",), reference=whole_record
    ),
    "mtbench": PublishedTask(
        file="question.jsonl of MT-Bench", texts=(), lists=("turns",), reference=whole_record
    ),
    "own-exact": own_task(reference=lambda line: line["answer"].strip() or None),
    "own-number": own_task(reference=lambda line: final_number(line["answer"]), wanted="a number"),
    "own-regex": own_task(reference=answer_pattern, wanted="a regular expression"),
    "story": GeneratedTask(
        problems=partial(story.story_problems, "test"), reference=lambda line: line["final"]
    ),
    "story-unseen": GeneratedTask(
        problems=partial(story.story_problems, "unseen"), reference=lambda line: line["final"]
    ),
    "sudoku": PublishedTask(
        file="sudoku_4x4_10.jsonl", texts=("input", "output"), reference=puzzle_input
    ),
    "sudoku-sheet": GeneratedTask(
        problems=partial(sudoku.sudoku_problems, "test"),
        reference=lambda line: sudoku.sheet_text(line["question"]),
    ),
    "table": GeneratedTask(
        problems=partial(table.table_problems, "test"), reference=lambda line: line["answer"]
    ),
}

JUDGES = tuple(name.removeprefix(OWN) for name in TASKS if name.startswith(OWN))
"""Scoring rules for a user's own lines."""

__all__ = ["JUDGES", "OWN", "TASKS", "Task"]
