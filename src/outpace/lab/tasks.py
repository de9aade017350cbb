"""Evaluation tasks: sources of lines, and what prompts and scorers read of each line."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from outpace.data.generated import Problem, story, sudoku, table
from outpace.data.numbers import final_number
from outpace.errors import OptionError
from outpace.jsonl import JsonRecord, read_records
from outpace.lab.scoring.expressions import STRICT_NUMBER, last_boxed

MAX_GENERATED_PROBLEMS = 100_000
"""Maximum number of generated problems: a few seconds and some hundred megabytes."""


PROMPT_FOLDER = Path(__file__).parent / "prompts"


def whole_record(record: JsonRecord) -> JsonRecord:
    return record


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A source of lines, whose fields a template can include."""

    reference: Callable[[JsonRecord], Any]
    """Returns the scorer's reference for a line."""
    stands_for: str | None = None
    """Task of the published results that are compared with those of this one."""

    @abstractmethod
    def load_lines(self, path: str | None, limit: int) -> list[JsonRecord]:
        """Return the first `limit` lines."""


@dataclass(frozen=True, kw_only=True)
class PublishedTask(Task):
    """Lines of a published JSON Lines file, which is not part of this package."""

    file: str
    """Name of the file where it is published."""
    texts: tuple[str, ...]
    """Fields that must contain a string."""
    lists: tuple[str, ...] = ()
    """Fields that must contain a list of strings; templates join them by newlines."""
    wanted: str = "a result"
    """What its last text must contain, for error messages."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields, as other releases of the file have them."""

    def load_lines(self, path: str | None, limit: int) -> list[JsonRecord]:
        if path is None or not Path(path).is_file():
            raise ValueError(f"--data: no file of the task at {path!r}; set it to {self.file}")
        return [
            self.check_record(record, place) for place, record in read_records(Path(path), limit)
        ]

    def check_record(self, record: JsonRecord, place: str) -> JsonRecord:
        record = {self.aliases.get(name, name): value for name, value in record.items()}
        for name in self.texts:
            if not isinstance(text := record.get(name), str) or not text:
                raise ValueError(f"{place}: {name} must be a text, got {brief(text)}")
        for name in self.lists:
            texts = record.get(name)
            if not (isinstance(texts, list) and texts and all(isinstance(t, str) for t in texts)):
                raise ValueError(f"{place}: {name} must be a list of texts, got {brief(texts)}")
        if self.reference(record) is None:
            raise ValueError(f"{place}: {self.texts[-1]} must contain {self.wanted}")
        return record


@dataclass(frozen=True, kw_only=True)
class PromptTask(PublishedTask):
    """Prompts of this package, or those of another file; answers are not judged."""

    texts: tuple[str, ...] = ("prompt",)
    reference: Callable[[JsonRecord], Any] = whole_record

    def load_lines(self, path: str | None, limit: int) -> list[JsonRecord]:
        return super().load_lines(path or str(PROMPT_FOLDER / self.file), limit)


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(Task):
    """Lines that are generated from a seed."""

    problems: Callable[[int], Sequence[Problem]]

    def load_lines(self, path: str | None, limit: int) -> list[JsonRecord]:
        if path is not None:
            raise ValueError(
                f"--data: the problems of this task are generated; omit the file {path!r}"
            )
        if limit > MAX_GENERATED_PROBLEMS:
            raise OptionError("limit", limit, f"must be at most {MAX_GENERATED_PROBLEMS} here")
        problems = self.problems(limit)
        return [
            {"question": p.question, "answer": p.answer, "final": p.final_result} for p in problems
        ]


def worked_result(record: JsonRecord) -> str | None:
    number_match = STRICT_NUMBER.search(record["answer"])
    return number_match[1].replace(",", "").removesuffix(".") if number_match else None


def boxed_result(record: JsonRecord) -> str | None:
    answer = record.get("answer")
    return answer if isinstance(answer, str) and answer else last_boxed(record["solution"])


def puzzle_input(record: JsonRecord) -> str:
    return record["input"]


def answer_pattern(record: JsonRecord) -> str | None:
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
        file="HumanEval.jsonl.gz", texts=("prompt", "test", "entry_point"), reference=whole_record
    ),
    "math500": PublishedTask(
        file="test.jsonl of MATH-500", texts=("problem", "solution"), reference=boxed_result
    ),
    "mbpp": PublishedTask(
        file="mbpp.jsonl",
        texts=("text", "code"),
        lists=("test_list",),
        reference=whole_record,
        aliases={"prompt": "text"},  # of the sanitized set
    ),
    "mtbench": PublishedTask(
        file="question.jsonl of MT-Bench", texts=(), lists=("turns",), reference=whole_record
    ),
    "own-exact": own_task(reference=lambda line: line["answer"].strip() or None),
    "own-number": own_task(reference=lambda line: final_number(line["answer"]), wanted="a number"),
    "own-regex": own_task(reference=answer_pattern, wanted="a regular expression"),
    "prose": PromptTask(file="prose.jsonl", stands_for="mtbench"),
    "records": PromptTask(file="records.jsonl"),
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
