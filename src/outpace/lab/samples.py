"""Files of answers, one per line, from which interrupted runs resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from outpace.api.output import Output, step_from_record, step_record
from outpace.data.answers import append_record, open_for_append
from outpace.jsonl import JsonRecord, parse_record
from outpace.lab.protocol import Question

SCHEMA_VERSION = 1
"""Version of sample files and reports."""


def questions_hash(questions: Sequence[Question]) -> str:
    """Return a hash of prompts, references and scoring rules."""
    contents = [[q.prompt, q.reference, q.score] for q in questions]
    return hashlib.sha256(json.dumps(contents, sort_keys=True, default=str).encode()).hexdigest()[
        :16
    ]


@dataclass(slots=True)
class Samples:
    """Stored records by number or key, and the file to which new ones are appended."""

    records: dict[int | str, JsonRecord]
    file: FileIO | None = None
    """The open file; None if records are not stored."""

    def add_record(self, number: int | str, record: JsonRecord) -> None:
        self.records[number] = record
        if self.file is not None:
            append_record(self.file, {"number": number, **record})

    def load_outputs(self, numbers: Iterable[int | str]) -> dict[int | str, Output]:
        """Return some of the records as outputs."""
        try:
            return {number: output_from_record(self.records[number]) for number in numbers}
        except (KeyError, TypeError, ValueError) as error:
            name = self.file and str(self.file.name)
            raise ValueError(f"{name} contains an invalid answer: {error!r}") from error


@contextmanager
def resume_samples(path: Path | None, header: Mapping[str, Any]) -> Iterator[Samples]:
    """Open a file of samples, with the records of an earlier run under the same header."""
    if path is None:
        yield Samples({})
        return
    with open_for_append(path) as file:
        file.seek(0)
        whole, end, partial = file.readall().rpartition(b"\n")
        lines = whole.split(b"\n") if end else []
        expected = json.loads(json.dumps({"schema": SCHEMA_VERSION, **header}, default=str))
        if lines:
            check_same_run(parse_record(lines[0], f"{path}:1"), expected, path)
        elif partial and not (json.dumps(expected).encode() + b"\n").startswith(partial):
            raise ValueError(f"{path} is not a file of answers; choose another file")
        if partial:
            file.truncate(len(whole + end))
        if not lines:
            append_record(file, expected)
        records = [parse_record(line, f"{path}:{n}") for n, line in enumerate(lines[1:], 2)]
        if unnumbered := [n for n, record in enumerate(records, 2) if "number" not in record]:
            raise ValueError(f"{path}:{unnumbered[0]} has no number")
        yield Samples({record["number"]: record for record in records}, file)


def check_same_run(actual: JsonRecord, expected: JsonRecord, path: Path) -> None:
    for key in [*expected, *actual]:
        if actual.get(key) != expected.get(key):
            raise ValueError(
                f"{path} contains answers of another run: {key} is {actual.get(key)!r}, "
                f"expected {expected.get(key)!r}; choose another file"
            )


def output_record(output: Output) -> JsonRecord:
    return {
        "text": output.text,
        "ids": list(output.ids),
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.prompt_tokens,
        "seconds": output.seconds,
        "steps": [*map(step_record, output.steps)],
    }


def output_from_record(record: JsonRecord) -> Output:
    return Output(
        text=str(record["text"]),
        ids=record["ids"],
        finish_reason=record["finish_reason"],
        prompt_tokens=record["prompt_tokens"],
        seconds=record["seconds"],
        steps=[*map(step_from_record, record["steps"])],
    )
