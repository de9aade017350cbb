"""Answers to many prompts, given as they end; and a file of prompts to a file of training data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, Unpack

from outpace.api.options import Options, seeded
from outpace.api.output import Output
from outpace.api.text import Message, Prompt, checked_prompt
from outpace.errors import prefixed
from outpace.jsonl import Record, parse, read_records
from outpace.lock import lock_file
from outpace.methods import Method


class Answering(Protocol):
    """Whatever answers many requests: a model, or several copies of it."""

    @property
    def name(self) -> str:
        """That of the model."""

    @property
    def method(self) -> Method:
        """How it decodes unless a request says otherwise."""

    def serve(
        self, requests: Iterable[tuple[Prompt | None, Options]], *, batch: int
    ) -> Iterator[tuple[int, Output]]:
        """Answer requests, each given with its number as it ends; as `LLM.serve`.

        Raises `Refused`, or `ValueError` for the last one that was taken.
        """


class Refused(ValueError):
    """A request that cannot be run, by its number, and why."""

    def __init__(self, cause: ValueError, number: int) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.number = number


def answers(
    llm: Answering, requests: Iterable[tuple[str, Prompt, Options]], *, batch: int
) -> Iterator[tuple[int, Output]]:
    """Answer named prompts, `batch` at a time, and give each with its number when it has ended.

    Prompts are taken as they are needed. Raises `ValueError` with its name for a bad one when its
    turn comes.
    """
    names: list[str] = []

    def named() -> Iterator[tuple[Prompt, Options]]:
        for name, prompt, options in requests:
            names.append(name)
            yield prompt, options

    served = llm.serve(named(), batch=batch)
    try:
        yield from served
    except Refused as error:
        raise prefixed(names[error.number], error.cause) from error
    except ValueError as error:
        raise prefixed(names[-1], error) from error


def answer_file(
    llm: Answering,
    source: str | Path,
    target: str | Path,
    *,
    batch: int = 64,
    progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
    **options: Unpack[Options],
) -> int:
    """Answer the prompts of a file; how many were answered now.

    Lines of `source` are JSON with `prompt`, or with `messages` that end before the assistant's.
    Each answer is appended to `target` as soon as it is there, as a line that training reads, with
    the number of its prompt's line. Answers of an earlier run are kept and not asked for again, so
    a run that was killed goes on. The prompt of line n has the seed `seed + n`.

    `progress` is called with the number of answers, of prompts, and of tokens that were made now.
    Raises `ValueError` that names the line for one that is no prompt or has no room, and where
    `target` holds other answers or another run writes to it.
    """
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve():
        raise ValueError(f"{source} is both input and output; give another output")
    prompts = read_prompts(source)
    options = seeded(options, 0)
    tokens = 0
    with appended(target) as file:
        done = answered(file, prompts)
        todo = [line for line in range(1, len(prompts) + 1) if line not in done]
        requests = ((f"{source}:{line}", prompts[line - 1], seeded(options, line)) for line in todo)
        progress(len(done), len(prompts), tokens)
        for count, (number, output) in enumerate(answers(llm, requests, batch=batch), 1):
            line = todo[number]
            append(file, {"line": line, **example(prompts[line - 1], output)})
            tokens += len(output.ids)
            progress(len(done) + count, len(prompts), tokens)
    return len(todo)


def example(prompt: str | list[Message], output: Output) -> Record:
    """A prompt and its answer as training reads them; a cut answer says so."""
    cut = {"finish_reason": "length"} if output.finish_reason == "length" else {}
    if isinstance(prompt, str):
        return {"prompt": prompt, "response": output.text, **cut}
    return {"messages": [*prompt, {"role": "assistant", "content": output.text}], **cut}


def read_prompts(path: Path) -> list[str | list[Message]]:
    """The prompts of a file; `ValueError` that names the line of a bad one."""
    if not path.is_file():
        raise ValueError(f"no prompts at {str(path)!r}; give a file of JSON lines")
    return [prompt_of(record, place) for place, record in read_records(path)]


def prompt_of(record: Record, place: str) -> str | list[Message]:
    """The prompt of a line: its messages, or its text where it has none."""
    prompt = record.get("messages") or record.get("prompt")
    match prompt:
        case str() if prompt:
            pass
        case [*_, {"role": str(role)}] if role != "assistant":
            pass
        case _:
            raise ValueError(
                f"{place} needs a prompt, or messages of which the last is not the "
                f"assistant's; found {', '.join(sorted(record)) or 'nothing'}"
            )
    try:
        return checked_prompt(prompt)
    except ValueError as error:
        raise prefixed(place, error) from error


@contextmanager
def appended(path: Path) -> Iterator[FileIO]:
    """A file to read and to append to, which no other run has open in this way."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file to append to; give another output")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a buffer, nothing of a line that found no room is written later.
    with path.open("a+b", buffering=0) as file:
        try:
            lock_file(file)
        except BlockingIOError as error:
            raise ValueError(f"another run writes to {path}; give another output") from error
        yield file


def append(file: FileIO, record: Record) -> None:
    """Write one line; `OSError` with the name of the file where it has no room."""
    line = json.dumps(record).encode() + b"\n"
    try:
        while line:
            line = line[file.write(line) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file.name)) from error


def answered(file: FileIO, prompts: list[str | list[Message]]) -> set[int]:
    """Lines whose answers stand in a file already; what a kill left of a last line is cut off.

    Raises `ValueError` where a line, or what is left of one, answers another prompt; the file then
    stays as it is.
    """
    file.seek(0)
    whole, end, torn = file.readall().rpartition(b"\n")
    done: set[int] = set()
    for number, text in enumerate(whole.split(b"\n") if end else [], 1):
        line = answered_line(parse(text, place := f"{file.name}:{number}"), prompts)
        if line is None:
            raise ValueError(f"{place} answers another prompt than the input has; {OTHER}")
        done.add(line)
    if torn:
        if not any(begins(torn, line, prompt) for line, prompt in enumerate(prompts, 1)):
            raise ValueError(f"{file.name} ends in what is no answer of this input; {OTHER}")
        file.truncate(len(whole + end))
    return done


OTHER = "give another output"


def answered_line(record: Record, prompts: list[str | list[Message]]) -> int | None:
    """The line whose prompt a record answers; None where it answers none."""
    match record:
        case {"messages": [*prompt, {"role": "assistant", "content": str()}]}:
            asked: Any = prompt
        case {"prompt": str(asked), "response": str()}:
            pass
        case _:
            return None
    line = record.get("line")
    known = type(line) is int and 1 <= line <= len(prompts) and prompts[line - 1] == asked
    return line if known else None


def begins(torn: bytes, line: int, prompt: str | list[Message]) -> bool:
    """Whether half a line is the beginning of the answer to a prompt."""
    asked = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
    whole = json.dumps({"line": line, **asked}).encode().rstrip(b"]}")
    return whole.startswith(torn) or torn.startswith(whole)
