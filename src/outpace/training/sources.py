"""Sources of conversations: JSON Lines files, Hugging Face data sets, generated problems."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from outpace.evaluation.generated import story, sudoku, table
from outpace.evaluation.generated.problems import Problem

STORY_PREFIX, HUB_PREFIX = "story:", "hub:"
PROBLEM_GENERATORS = {
    STORY_PREFIX: story.story_problems,
    "sudoku:": sudoku.sudoku_problems,
    "table:": table.table_problems,
}
"""Problem generators by path prefix."""

AnsweredConversation = tuple[list[dict[str, str]], str, bool]
"""Messages, the answer to them, and whether the answer is complete."""

FieldNames = tuple[str, str]
"""Names of the prompt and response fields."""


class ConversationSource(Protocol):
    """An endless stream of conversations.

    `size` is the number of records of an epoch; None if the stream never repeats.
    """

    size: int | None

    def __call__(self, number: int) -> AnsweredConversation:
        """Return conversation number n, a function of n alone."""
        ...

    def record_number(self, number: int) -> int:
        """Return the record number of conversation number n."""
        ...

    def read_record(self, record: int) -> tuple[str, AnsweredConversation]:
        """Return a record's location, for error messages, and its conversation."""
        ...

    def iterate_records(self) -> Iterator[tuple[str, AnsweredConversation]]:
        """Yield the location and conversation of each record; `ValueError` names an invalid one."""
        ...


@dataclass(slots=True)
class GeneratedProblems:
    """Endless generated problems."""

    generate: Callable[..., list[Problem]]
    size: int | None = None

    def __call__(self, number: int) -> AnsweredConversation:
        """Return problem number n as a conversation."""
        return self.read_record(number)[1]

    def record_number(self, number: int) -> int:
        """Return the number itself, since problems never repeat."""
        return number

    def read_record(self, record: int) -> tuple[str, AnsweredConversation]:
        """Return a problem as a conversation."""
        (problem,) = self.generate(start=record)
        messages = [{"role": "user", "content": problem.question}]
        return f"problem {record}", (messages, problem.answer, True)

    def iterate_records(self) -> Iterator[tuple[str, AnsweredConversation]]:
        """Yield nothing: generated problems need no check."""
        return iter(())


class ShuffledRecords:
    """Records in a new random order each epoch."""

    size: int | None

    def __init__(self, records: Records, seed: int, fields: FieldNames | None) -> None:
        self.records, self.seed, self.fields = records, seed, fields
        self.size = self.count = len(records)
        self.epoch_order = -1, np.arange(0)

    def __call__(self, number: int) -> AnsweredConversation:
        """Return conversation number n of the endless stream."""
        return self.read_record(self.record_number(number))[1]

    def record_number(self, number: int) -> int:
        """Return the record number of conversation number n, in its epoch's order."""
        epoch, place = divmod(number, self.count)
        if self.epoch_order[0] != epoch:
            shuffle = np.random.default_rng([self.seed, epoch, 1])
            self.epoch_order = epoch, shuffle.permutation(self.count)
        return int(self.epoch_order[1][place])

    def read_record(self, record: int) -> tuple[str, AnsweredConversation]:
        """Return a record's location and its conversation."""
        place = self.records.describe_location(record)
        return place, parse_conversation(self.records[record], place, self.fields)

    def iterate_records(self) -> Iterator[tuple[str, AnsweredConversation]]:
        """Yield location and conversation of all records, unshuffled."""
        return map(self.read_record, range(self.count))


class Records(Protocol):
    """A sequence of raw records."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Any:
        """Return one record."""
        ...

    def describe_location(self, number: int) -> str:
        """Return the location of a record, for error messages."""
        ...


class JsonLinesFile:
    """A JSON Lines file, in memory."""

    def __init__(self, path: Path) -> None:
        """Read the file; `ValueError` if it is missing, empty or not UTF-8."""
        self.path, self.lines = path, read_lines(path)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> Any:
        """Parse a line."""
        try:
            return json.loads(self.lines[number])
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.describe_location(number)} is not valid JSON: {error}"
            ) from error

    def describe_location(self, number: int) -> str:
        """Return file and line number."""
        return f"{self.path}:{number + 1}"


class HubDataset:
    """A Hugging Face data set: `owner/name`, `owner/name:config` or `owner/name:config:split`.

    The split defaults to `train`. The library `datasets` downloads and caches it.
    """

    def __init__(self, name: str) -> None:
        """Load the data set; `ValueError` if it or the library `datasets` is not available."""
        try:
            from datasets import load_dataset
        except ImportError as error:
            remedy = "data sets of the hub need: pip install 'outpace[train]'"
            raise ValueError(f"{error}; {remedy}") from error
        self.name = name
        repository, config, split = (*name.split(":"), "", "")[:3]
        try:
            self.rows = load_dataset(repository, config or None, split=split or "train")
        except Exception as error:  # the hub, its files and their readers raise any type
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"no data set at {HUB_PREFIX + name!r}: {reason}") from error
        if not len(self.rows):
            raise ValueError(f"{HUB_PREFIX + name!r} is empty; it needs at least one example")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        """Return one row."""
        return self.rows[number]

    def describe_location(self, number: int) -> str:
        """Return data set and row number."""
        return f"{HUB_PREFIX}{self.name}, row {number + 1}"


def open_source(
    path: str,
    seed: int,
    *,
    fields: FieldNames | None = None,
    plain: bool = False,
    split: str = "train",
) -> ConversationSource:
    """Open the source of a path; generated problems use `split`, and `plain` for stories."""
    for kind, make in PROBLEM_GENERATORS.items():
        if path.startswith(kind):
            if path != f"{kind}{split}":
                purpose = "training" if split == "train" else "evaluation"
                raise ValueError(f"path {path!r} is not for {purpose}; use {kind}{split}")
            options = {"plain": plain} if kind == STORY_PREFIX else {}
            return GeneratedProblems(partial(make, split, 1, seed=seed, **options))
    if path.startswith(HUB_PREFIX):
        return ShuffledRecords(HubDataset(path.removeprefix(HUB_PREFIX)), seed, fields)
    return ShuffledRecords(JsonLinesFile(Path(path)), seed, fields)


def read_lines(path: Path) -> list[str]:
    """Read the lines of a file, without trailing empty ones."""
    if not path.is_file():
        raise ValueError(f"no data at {str(path)!r}; give a JSON Lines file, or story:train")
    try:
        text = path.read_text(encoding="utf-8").rstrip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be loaded as UTF-8: {error}") from error
    if not text:
        raise ValueError(f"{str(path)!r} is empty; it needs at least one example")
    # `splitlines` would also split at characters that are allowed in a JSON string.
    return text.split("\n")


def parse_conversation(
    record: Any, place: str, fields: FieldNames | None = None
) -> AnsweredConversation:
    """Return the messages of a record, the answer, and whether the answer is complete.

    Raises:
        ValueError: the record has no prompt and response; `place` is named.
    """
    ended = not isinstance(record, dict) or record.get("finish_reason") != "length"
    if fields is not None and isinstance(record, dict):
        record = dict(zip(("prompt", "response"), map(record.get, fields), strict=True))
    record = convert_record(record)
    match record:
        case {"response": ""} | {"messages": [*_, {"role": "assistant", "content": ""}]}:
            raise ValueError(f"{place} has an empty response; remove it")
        case {"prompt": str(prompt), "response": str(response)}:
            found: list[Any] = [{"role": "user", "content": prompt}]
        case {"messages": [*found, {"role": "assistant", "content": str(response)}]}:
            pass
        case _:
            raise ValueError(f"{place} {describe_missing(record, fields)}")
    for each in found:
        check_message(each, place)
    return found, check_utf8(response, place), ended


SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
"""Chat roles by their names in ShareGPT files; `system` is unchanged."""


def convert_record(record: Any) -> Any:
    """Convert a record in ShareGPT, Alpaca or plain-text format; others are returned unchanged."""
    match record:
        case {"conversations": [*turns]}:
            messages = [
                {
                    "role": SHAREGPT_ROLES.get(str(turn.get("from")), turn.get("from")),
                    "content": turn["value"],
                }
                if isinstance(turn, dict) and "value" in turn
                else turn
                for turn in turns
            ]
            return {"messages": messages}
        case {"instruction": str(instruction), "output": response, **rest}:
            text = rest.get("input")
            prompt = f"{instruction}\n\n{text}" if text else instruction
            return {"prompt": prompt, "response": response}
        case {"text": text, **rest} if not {"prompt", "response", "messages"} & {*rest}:
            return {"messages": [{"role": "assistant", "content": text}]}
    return record


def describe_missing(record: Any, fields: FieldNames | None) -> str:
    """Describe the fields that a record should have."""
    if fields is not None:
        return f"needs texts in {' and '.join(fields)}, as set by fields"
    found = sorted(record) if isinstance(record, dict) else type(record).__name__
    return (
        f"needs prompt and response, or messages that end with the assistant's; found {found}; "
        "set fields for other names"
    )


def check_message(message: Any, place: str) -> None:
    """Raise `ValueError` for a message whose role or content is not a string."""
    match message:
        case {"role": str(), "content": str(content)}:
            check_utf8(content, place)
        case _:
            raise ValueError(f"{place} needs messages with role and content, both texts")


def check_utf8(text: str, place: str) -> str:
    """Return the text; `ValueError` if it has unpaired surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} has a text that is not valid UTF-8: {error}") from error
    return text
