"""Tasks: sources of lines, and what prompts and scorers read of each line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from outpace.evaluation.generated.problems import Problem
from outpace.jsonl import JsonRecord, read_records

MAX_GENERATED_PROBLEMS = 100_000
"""Maximum number of generated problems: a few seconds and some hundred megabytes."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A source of lines, whose fields a template can include.

    Attributes:
        reference: Returns the scorer's reference for a line.
    """

    reference: Callable[[JsonRecord], Any]

    @abstractmethod
    def load_lines(self, path: str | None, limit: int) -> list[JsonRecord]:
        """Return the first `limit` lines.

        Raises:
            ValueError: If a line is invalid, or a file is missing or unexpected.
        """


@dataclass(frozen=True, kw_only=True)
class PublishedTask(Task):
    """Lines of a published JSON Lines file, which is not part of this package.

    Attributes:
        texts: Fields that must contain a string.
        lists: Fields that must contain a list of strings; templates join them by newlines.
        file: Name of the file where it is published.
        wanted: What its last text must contain, for error messages.
    """

    file: str
    texts: tuple[str, ...]
    lists: tuple[str, ...] = ()
    wanted: str = "a result"

    def load_lines(self, path: str | None, limit: int) -> list[JsonRecord]:
        """Return the first `limit` lines of the file."""
        if path is None or not Path(path).is_file():
            raise ValueError(f"--data: no file of the task at {path!r}; set it to {self.file}")
        return [
            self.check_record(record, place) for place, record in read_records(Path(path), limit)
        ]

    def check_record(self, record: JsonRecord, place: str) -> JsonRecord:
        """Return a line after checking its fields."""
        for field in self.texts:
            if not isinstance(text := record.get(field), str) or not text:
                raise ValueError(f"{place}: {field} must be a text, got {brief(text)}")
        for field in self.lists:
            texts = record.get(field)
            if not (isinstance(texts, list) and texts and all(isinstance(t, str) for t in texts)):
                raise ValueError(f"{place}: {field} must be a list of texts, got {brief(texts)}")
        if self.reference(record) is None:
            raise ValueError(f"{place}: {self.texts[-1]} must contain {self.wanted}")
        return record


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(Task):
    """Lines that are generated from a seed."""

    problems: Callable[[int], Sequence[Problem]]

    def load_lines(self, path: str | None, limit: int) -> list[JsonRecord]:
        """Return `limit` generated lines."""
        if path is not None:
            raise ValueError(
                f"--data: the problems of this task are generated; omit the file {path!r}"
            )
        if limit > MAX_GENERATED_PROBLEMS:
            raise ValueError(
                f"limit must be at most {MAX_GENERATED_PROBLEMS} for generated "
                f"problems, got {limit}"
            )
        problems = self.problems(limit)
        return [
            {"question": p.question, "answer": p.answer, "final": p.final_result} for p in problems
        ]
