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

STORY, HUB = "story:", "hub:"
PROBLEMS = {STORY: story.problems, "sudoku:": sudoku.problems, "table:": table.problems}
"""Problem generators by path prefix."""

Conversation = tuple[list[dict[str, str]], str, bool]
"""Messages, the answer to them, and whether the answer is complete."""

Fields = tuple[str, str]
"""Names of the prompt and response fields."""


class Source(Protocol):
    """An endless stream of conversations.

    `size` is the number of records of an epoch; None if the stream never repeats.
    """

    size: int | None

    def __call__(self, number: int) -> Conversation:
        """Return conversation number n, a function of n alone."""
        ...

    def record(self, number: int) -> int:
        """Return the record number of conversation number n."""
        ...

    def read(self, record: int) -> tuple[str, Conversation]:
        """Return a record's location, for error messages, and its conversation."""
        ...

    def all(self) -> Iterator[tuple[str, Conversation]]:
        """Yield the location and conversation of each record; `ValueError` names an invalid one."""
        ...


@dataclass(slots=True)
class Posed:
    """Endless generated problems."""

    make: Callable[..., list[Problem]]
    size: int | None = None

    def __call__(self, number: int) -> Conversation:
        """Return problem number n as a conversation."""
        return self.read(number)[1]

    def record(self, number: int) -> int:
        """Return the number itself, since problems never repeat."""
        return number

    def read(self, record: int) -> tuple[str, Conversation]:
        """Return a problem as a conversation."""
        (problem,) = self.make(start=record)
        messages = [{"role": "user", "content": problem.question}]
        return f"problem {record}", (messages, problem.answer, True)

    def all(self) -> Iterator[tuple[str, Conversation]]:
        """Yield nothing: generated problems need no check."""
        return iter(())


class Shuffled:
    """Records in a new random order each epoch."""

    size: int | None

    def __init__(self, records: Records, seed: int, fields: Fields | None) -> None:
        self.records, self.seed, self.fields = records, seed, fields
        self.size = self.count = len(records)
        self.order = -1, np.arange(0)

    def __call__(self, number: int) -> Conversation:
        """Return conversation number n of the endless stream."""
        return self.read(self.record(number))[1]

    def record(self, number: int) -> int:
        """Return the record number of conversation number n, in its epoch's order."""
        epoch, place = divmod(number, self.count)
        if self.order[0] != epoch:
            shuffle = np.random.default_rng([self.seed, epoch, 1])
            self.order = epoch, shuffle.permutation(self.count)
        return int(self.order[1][place])

    def read(self, record: int) -> tuple[str, Conversation]:
        """Return a record's location and its conversation."""
        place = self.records.place(record)
        return place, conversation(self.records[record], place, self.fields)

    def all(self) -> Iterator[tuple[str, Conversation]]:
        """Yield location and conversation of all records, unshuffled."""
        return map(self.read, range(self.count))


class Records(Protocol):
    """A sequence of raw records."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Any:
        """Return one record."""
        ...

    def place(self, number: int) -> str:
        """Return the location of a record, for error messages."""
        ...


class Lines:
    """A JSON Lines file, in memory."""

    def __init__(self, path: Path) -> None:
        """Read the file; `ValueError` if it is missing, empty or not UTF-8."""
        self.path, self.lines = path, lines_of(path)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> Any:
        """Parse a line."""
        try:
            return json.loads(self.lines[number])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.place(number)} is not valid JSON: {error}") from error

    def place(self, number: int) -> str:
        """Return file and line number."""
        return f"{self.path}:{number + 1}"


class Published:
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
            raise ValueError(f"no data set at {HUB + name!r}: {reason}") from error
        if not len(self.rows):
            raise ValueError(f"{HUB + name!r} is empty; it needs at least one example")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        """Return one row."""
        return self.rows[number]

    def place(self, number: int) -> str:
        """Return data set and row number."""
        return f"{HUB}{self.name}, row {number + 1}"


def source(
    path: str, seed: int, *, fields: Fields | None = None, plain: bool = False, split: str = "train"
) -> Source:
    """Open the source of a path; generated problems use `split`, and `plain` for stories."""
    for kind, make in PROBLEMS.items():
        if path.startswith(kind):
            if path != f"{kind}{split}":
                purpose = "training" if split == "train" else "evaluation"
                raise ValueError(f"path {path!r} is not for {purpose}; use {kind}{split}")
            options = {"plain": plain} if kind == STORY else {}
            return Posed(partial(make, split, 1, seed=seed, **options))
    if path.startswith(HUB):
        return Shuffled(Published(path.removeprefix(HUB)), seed, fields)
    return Shuffled(Lines(Path(path)), seed, fields)


def lines_of(path: Path) -> list[str]:
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


def conversation(record: Any, place: str, fields: Fields | None = None) -> Conversation:
    """Return the messages of a record, the answer, and whether the answer is complete.

    Raises:
        ValueError: the record has no prompt and response; `place` is named.
    """
    ended = not isinstance(record, dict) or record.get("finish_reason") != "length"
    if fields is not None and isinstance(record, dict):
        record = dict(zip(("prompt", "response"), map(record.get, fields), strict=True))
    record = ours(record)
    match record:
        case {"response": ""} | {"messages": [*_, {"role": "assistant", "content": ""}]}:
            raise ValueError(f"{place} has an empty response; remove it")
        case {"prompt": str(prompt), "response": str(response)}:
            found: list[Any] = [{"role": "user", "content": prompt}]
        case {"messages": [*found, {"role": "assistant", "content": str(response)}]}:
            pass
        case _:
            raise ValueError(f"{place} {lack(record, fields)}")
    for each in found:
        check_message(each, place)
    return found, checked(response, place), ended


SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
"""Chat roles by their names in ShareGPT files; `system` is unchanged."""


def ours(record: Any) -> Any:
    """Convert a record in ShareGPT, Alpaca or plain-text format; others are returned unchanged."""
    match record:
        case {"conversations": [*turns]}:
            messages = [
                {
                    "role": SPEAKERS.get(str(turn.get("from")), turn.get("from")),
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


def lack(record: Any, fields: Fields | None) -> str:
    """Describe the fields that a record should have."""
    if fields is not None:
        return f"needs texts in {' and '.join(fields)}, as set by fields"
    found = sorted(record) if isinstance(record, dict) else type(record).__name__
    return (
        f"needs prompt and response, or messages that end with the assistant's; found {found}; "
        "set fields for other names"
    )


def check_message(message: Any, place: str) -> None:
    """Raise `ValueError` for a message without a text as role and as content."""
    match message:
        case {"role": str(), "content": str(content)}:
            checked(content, place)
        case _:
            raise ValueError(f"{place} needs messages with role and content, both texts")


def checked(text: str, place: str) -> str:
    """Return the text; `ValueError` if it has unpaired surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} has a text that is not valid UTF-8: {error}") from error
    return text
