"""A file of answers, a line each, that a run which was killed goes on with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from outpace.api.answers import append, appended
from outpace.api.output import Output
from outpace.decoding import Step
from outpace.evaluation.question import Question
from outpace.jsonl import Record, parse

SCHEMA = 1
"""Version of what is written, here and in reports."""


def digest(questions: Sequence[Question]) -> str:
    """What tells one list of questions from another: their prompts, references and rules."""
    asked = [[q.prompt, q.reference, q.score] for q in questions]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(slots=True)
class Samples:
    """Records that are there already, by their numbers or keys, and a file for more.

    `file` is None where none is kept.
    """

    records: dict[int | str, Record]
    file: FileIO | None = None

    def add(self, number: int | str, record: Record) -> None:
        """Keep one more."""
        self.records[number] = record
        if self.file is not None:
            append(self.file, {"number": number, **record})

    def outputs(self, numbers: Iterable[int | str]) -> dict[int | str, Output]:
        """Some of the records as answers; `ValueError` where one is none."""
        try:
            return {number: restored(self.records[number]) for number in numbers}
        except (KeyError, TypeError, ValueError) as error:
            name = self.file and str(self.file.name)
            raise ValueError(f"{name} holds a line that is no answer: {error!r}") from error


@contextmanager
def kept(path: Path | None, header: Mapping[str, Any]) -> Iterator[Samples]:
    """What an earlier run of the same has found, to which this one adds.

    Raises `ValueError` where the file holds answers of another run, with what differs; it then
    stays as it is.
    """
    if path is None:
        yield Samples({})
        return
    with appended(path) as file:
        file.seek(0)
        whole, end, torn = file.readall().rpartition(b"\n")
        lines = whole.split(b"\n") if end else []
        expected = json.loads(json.dumps({"schema": SCHEMA, **header}, default=str))
        if lines:
            compare(parse(lines[0], f"{path}:1"), expected, path)
        elif torn and not (json.dumps(expected).encode() + b"\n").startswith(torn):
            raise ValueError(f"{path} holds something else than answers; name another file")
        if torn:
            file.truncate(len(whole + end))
        if not lines:
            append(file, expected)
        records = [parse(line, f"{path}:{n}") for n, line in enumerate(lines[1:], 2)]
        if unnumbered := [n for n, record in enumerate(records, 2) if "number" not in record]:
            raise ValueError(f"{path}:{unnumbered[0]} has no number")
        yield Samples({record["number"]: record for record in records}, file)


def compare(found: Record, expected: Record, path: Path) -> None:
    """Raise `ValueError` with the first thing in which two runs differ."""
    for key in [*expected, *found]:
        if found.get(key) != expected.get(key):
            raise ValueError(
                f"{path} holds answers of another run: its {key} is {found.get(key)!r}, "
                f"not {expected.get(key)!r}; name another file"
            )


def written(output: Output) -> Record:
    """An answer as a line has it; of each forward what is counted."""
    return {
        "text": output.text,
        "ids": list(output.ids),
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.prompt_tokens,
        "seconds": output.seconds,
        "steps": [
            [
                s.model,
                s.start,
                s.rows,
                s.seen,
                s.kept,
                s.seconds,
                [[r.start, r.stop] for r in s.holes],
            ]
            for s in output.steps
        ],
    }


def restored(record: Record) -> Output:
    """An answer from its line; patterns of the forwards are not kept."""
    return Output(
        text=str(record["text"]),
        ids=record["ids"],
        finish_reason=record["finish_reason"],
        prompt_tokens=record["prompt_tokens"],
        seconds=record["seconds"],
        steps=[
            Step(model, start, rows, seen, kept, seconds, holes=tuple(range(*run) for run in holes))
            for model, start, rows, seen, kept, seconds, holes in record["steps"]
        ],
    )
