"""GSM8K (Cobbe et al., 2021), read from a file of JSON lines; not part of this package."""

from __future__ import annotations

from pathlib import Path
from reprlib import repr as brief

from outpace.evaluation.tasks.question import Question, final_number
from outpace.jsonl import Record, read_records


def gsm8k(limit: int, path: str | None) -> list[Question]:
    """The first problems of a file with `question` and `answer` in each line.

    Raises `ValueError` where there is no file, or with file, line and field for a bad one.
    """
    if path is None or not Path(path).is_file():
        raise ValueError(f"no GSM8K file at {path!r}: name one with --data, such as test.jsonl")
    return [problem(record, place) for place, record in read_records(Path(path), limit)]


def problem(record: Record, place: str) -> Question:
    """One line as a question."""
    for field in ("question", "answer"):
        if not isinstance(text := record.get(field), str) or not text:
            raise ValueError(f"{place} needs a text as {field}, not {brief(text)}")
    final = final_number(record["answer"])
    if final is None:
        raise ValueError(f"{place} needs a number behind #### in its answer")
    return Question(record["question"], final)
