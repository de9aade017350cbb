"""Where conversations come from: files of JSON lines, data sets of the hub, problems of the zoo."""

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
"""What the zoo makes up, by what a path begins with."""

Conversation = tuple[list[dict[str, str]], str, bool]
"""Messages, the answer to them, and whether that is whole."""

Fields = tuple[str, str]
"""What the fields of prompt and response are called."""


class Source(Protocol):
    """An endless stream of conversations; `size` of them make an epoch, None where none repeats."""

    size: int | None

    def __call__(self, number: int) -> Conversation:
        """Conversation number n; a function of n alone."""
        ...

    def record(self, number: int) -> int:
        """The record that conversation number n is."""
        ...

    def read(self, record: int) -> tuple[str, Conversation]:
        """A record and its place."""
        ...

    def all(self) -> Iterator[tuple[str, Conversation]]:
        """Each conversation of an epoch with its place; `ValueError` that names a bad one."""
        ...


@dataclass(slots=True)
class Posed:
    """Problems of the zoo."""

    make: Callable[..., list[Problem]]
    size: int | None = None

    def __call__(self, number: int) -> Conversation:
        """Problem number n as a conversation."""
        return self.read(number)[1]

    def record(self, number: int) -> int:
        """Each is another one."""
        return number

    def read(self, record: int) -> tuple[str, Conversation]:
        """A problem as a conversation."""
        (problem,) = self.make(start=record)
        messages = [{"role": "user", "content": problem.question}]
        return f"problem {record}", (messages, problem.answer, True)

    def all(self) -> Iterator[tuple[str, Conversation]]:
        """None: they are made here."""
        return iter(())


class Shuffled:
    """Records in another order each epoch."""

    size: int | None

    def __init__(self, records: Records, seed: int, fields: Fields | None) -> None:
        self.records, self.seed, self.fields = records, seed, fields
        self.size = self.count = len(records)
        self.order = -1, np.arange(0)

    def __call__(self, number: int) -> Conversation:
        """Conversation number n of the endless stream."""
        return self.read(self.record(number))[1]

    def record(self, number: int) -> int:
        """The record that it is, in the order of its epoch."""
        epoch, place = divmod(number, self.count)
        if self.order[0] != epoch:
            shuffle = np.random.default_rng([self.seed, epoch, 1])
            self.order = epoch, shuffle.permutation(self.count)
        return int(self.order[1][place])

    def read(self, record: int) -> tuple[str, Conversation]:
        """A record and its place."""
        place = self.records.place(record)
        return place, conversation(self.records[record], place, self.fields)

    def all(self) -> Iterator[tuple[str, Conversation]]:
        """In the order of the records."""
        return map(self.read, range(self.count))


class Records(Protocol):
    """Records by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Any:
        """One of them."""
        ...

    def place(self, number: int) -> str:
        """Where one stands, for a message."""
        ...


class Lines:
    """A file of JSON lines."""

    def __init__(self, path: Path) -> None:
        """Read it; `ValueError` where it is missing, empty or no text."""
        self.path, self.lines = path, lines_of(path)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> Any:
        """What a line holds."""
        try:
            return json.loads(self.lines[number])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.place(number)} is not JSON: {error}") from error

    def place(self, number: int) -> str:
        """File and line."""
        return f"{self.path}:{number + 1}"


class Published:
    """A data set of the hub, named `owner/name`, `owner/name:config` or `owner/name:config:split`.

    The split is `train` unless named. It is downloaded once, by the library `datasets`.
    """

    def __init__(self, name: str) -> None:
        """Load it; `ValueError` where the hub or the library has nothing for us."""
        try:
            from datasets import load_dataset
        except ImportError as error:
            needed = "data of the hub needs: pip install 'outpace[train]'"
            raise ValueError(f"{error}; {needed}") from error
        self.name = name
        repository, config, split = (*name.split(":"), "", "")[:3]
        try:
            self.rows = load_dataset(repository, config or None, split=split or "train")
        except Exception as error:  # of the hub, of its files, of any reader of theirs
            told = " ".join(str(error).split())[:300]
            raise ValueError(f"no data set at {HUB + name!r}: {told}") from error
        if not len(self.rows):
            raise ValueError(f"{HUB + name!r} is empty; it needs at least one example")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        """One row."""
        return self.rows[number]

    def place(self, number: int) -> str:
        """Name and row."""
        return f"{HUB}{self.name}, row {number + 1}"


def source(
    path: str, seed: int, *, fields: Fields | None = None, plain: bool = False, split: str = "train"
) -> Source:
    """What gives the conversations of a path by number; of the zoo's problems those of a split."""
    for kind, make in PROBLEMS.items():
        if path.startswith(kind):
            if path != f"{kind}{split}":
                purpose = "training" if split == "train" else "evaluation"
                raise ValueError(f"{path!r} is not for {purpose}; use {kind}{split}")
            options = {"plain": plain} if kind == STORY else {}
            return Posed(partial(make, split, 1, seed=seed, **options))
    if path.startswith(HUB):
        return Shuffled(Published(path.removeprefix(HUB)), seed, fields)
    return Shuffled(Lines(Path(path)), seed, fields)


def lines_of(path: Path) -> list[str]:
    """The lines of a file, without empty ones at its end."""
    if not path.is_file():
        raise ValueError(f"no data at {str(path)!r}; give a file of JSON lines, or story:train")
    try:
        text = path.read_text(encoding="utf-8").rstrip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be loaded as UTF-8: {error}") from error
    if not text:
        raise ValueError(f"{str(path)!r} is empty; it needs at least one example")
    # Not `splitlines`, which also cuts at characters that may stand in a JSON string.
    return text.split("\n")


def conversation(record: Any, place: str, fields: Fields | None = None) -> Conversation:
    """Messages of a record, the answer to them, and whether that is whole."""
    ended = not isinstance(record, dict) or record.get("finish_reason") != "length"
    if fields is not None and isinstance(record, dict):
        record = dict(zip(("prompt", "response"), map(record.get, fields), strict=True))
    record = ours(record)
    match record:
        case {"response": ""} | {"messages": [*_, {"role": "assistant", "content": ""}]}:
            raise ValueError(f"{place} has an empty response, from which there is nothing to learn")
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
"""Roles by what ShareGPT's files call them; `system` is the same."""


def ours(record: Any) -> Any:
    """A record of ShareGPT's format, of Alpaca's or of plain text as one of ours.

    Any other stays as it is.
    """
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
        case {"instruction": str(asked), "output": response, **rest}:
            given = rest.get("input")
            return {"prompt": f"{asked}\n\n{given}" if given else asked, "response": response}
        case {"text": text, **rest} if not {"prompt", "response", "messages"} & {*rest}:
            return {"messages": [{"role": "assistant", "content": text}]}
    return record


def lack(record: Any, fields: Fields | None) -> str:
    """What a record should have."""
    if fields is not None:
        return f"needs texts as {' and '.join(fields)}, which fields names"
    held = sorted(record) if isinstance(record, dict) else type(record).__name__
    return (
        f"needs prompt and response, or messages that end with the assistant's; found {held}; "
        "fields names others"
    )


def check_message(given: Any, place: str) -> None:
    """Raise `ValueError` for a message without a role and a content, both of them texts."""
    match given:
        case {"role": str(), "content": str(content)}:
            checked(content, place)
        case _:
            raise ValueError(f"{place} needs messages of role and content, both texts")


def checked(text: str, place: str) -> str:
    """A text that UTF-8 can write; `ValueError` for one with half a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} has a text that is not UTF-8: {error}") from error
    return text
