"""Where the lines of a task come from, and what a prompt and a scorer may know of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from outpace.evaluation.generated.problems import Problem
from outpace.jsonl import Record, read_records

MOST = 100_000
"""Problems that are made at a time: a few seconds, and some hundred megabytes."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Lines, each with texts that a template may name.

    Attributes:
        reference: what a scorer needs to know of a line.
    """

    reference: Callable[[Record], Any]

    @abstractmethod
    def lines(self, path: str | None, limit: int) -> list[Record]:
        """The first lines; `ValueError` for a bad one, or a file that is missing or not read."""


@dataclass(frozen=True, kw_only=True)
class Published(Task):
    """Lines of a published file of JSON lines, which is not part of this package.

    Attributes:
        texts: fields that must hold a text.
        lists: fields that must hold a list of texts; a template finds them one below the other.
        file: what the file is called where it is published.
        wanted: what its last text must hold, in words.
    """

    file: str
    texts: tuple[str, ...]
    lists: tuple[str, ...] = ()
    wanted: str = "a result"

    def lines(self, path: str | None, limit: int) -> list[Record]:
        """Of the file; a bad line is named with its field."""
        if path is None or not Path(path).is_file():
            raise ValueError(f"no file of the task at {path!r}: name one with --data: {self.file}")
        return [self.checked(record, place) for place, record in read_records(Path(path), limit)]

    def checked(self, record: Record, place: str) -> Record:
        """A line that has what it must."""
        for field in self.texts:
            if not isinstance(text := record.get(field), str) or not text:
                raise ValueError(f"{place} needs a text as {field}, not {brief(text)}")
        for field in self.lists:
            texts = record.get(field)
            if not (isinstance(texts, list) and texts and all(isinstance(t, str) for t in texts)):
                raise ValueError(f"{place} needs a list of texts as {field}, not {brief(texts)}")
        if self.reference(record) is None:
            raise ValueError(f"{place} needs {self.wanted} in its {self.texts[-1]}")
        return record


@dataclass(frozen=True, kw_only=True)
class Made(Task):
    """Lines that are made by seed, here."""

    problems: Callable[[int], Sequence[Problem]]

    def lines(self, path: str | None, limit: int) -> list[Record]:
        """As many as are wanted."""
        if path is not None:
            raise ValueError(
                f"problems of this task are generated; they are not read from {path!r}"
            )
        if limit > MOST:
            raise ValueError(f"limit must be at most {MOST} where problems are made, not {limit}")
        made = self.problems(limit)
        return [{"question": p.question, "answer": p.answer, "final": p.final} for p in made]
