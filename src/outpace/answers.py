"""Answers to many prompts, given as they end; and a file of prompts to a file of training data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Unpack

from outpace.llm import LLM, Answer, Options, Output
from outpace.text import Prompt

Record = dict[str, Any]


def answers(
    llm: LLM, requests: Iterable[tuple[str, Prompt, Options]], *, batch: int
) -> Iterator[tuple[int, Output]]:
    """Answer named prompts, `batch` at a time, and give each with its number when it has ended.

    Prompts are taken as they are needed. Raises `ValueError` with its name for a bad one when its
    turn comes.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, not {batch}")
    usual, llm.engine.max_sequences = llm.engine.max_sequences, batch
    waiting: dict[int, Answer] = {}
    coming = enumerate(requests)
    try:
        while True:
            while len(waiting) < 2 * batch and (request := next(coming, None)):
                number, (name, prompt, options) = request  # as many queue as run
                try:
                    waiting[number] = llm.submit(prompt, **options)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
            if not waiting:
                return
            llm.engine.step()
            for number in [number for number, answer in waiting.items() if answer.job.done]:
                yield number, waiting.pop(number).output()
    finally:
        llm.engine.max_sequences = usual
        for answer in waiting.values():
            llm.engine.cancel(answer.job)


def answer_file(
    llm: LLM,
    source: str | Path,
    target: str | Path,
    *,
    batch: int = 64,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Unpack[Options],
) -> int:
    """Answer the prompts of a file; how many were answered now.

    Lines of `source` are JSON with `prompt`, or with `messages` that end before the assistant's.
    Each answer is appended to `target` as soon as it is there, as a line that training reads, with
    the number of its prompt's line. Answers of an earlier run are kept and not asked for again, so
    a run that was killed goes on. The prompt of line n has the seed `seed + n`.

    `progress` is called with the number of answers and of prompts. Raises `ValueError` that names
    the line for one that is no prompt or has no room, and where `target` holds other answers.
    """
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve():
        raise ValueError(f"{source} is both input and output; give another output")
    records = read_prompts(source)
    done = answered(target, records)
    todo = [line for line in range(1, len(records) + 1) if line not in done]
    seed = options.pop("seed", 0)
    requests = (
        (
            f"{source}:{line}",
            records[line - 1].get("messages") or records[line - 1]["prompt"],
            Options(**options, seed=seed + line),
        )
        for line in todo
    )
    progress(len(done), len(records))
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a", encoding="utf-8") as file:
        for count, (number, output) in enumerate(answers(llm, requests, batch=batch), 1):
            line = todo[number]
            record = {"line": line, **example(records[line - 1], output)}
            file.write(json.dumps(record) + "\n")
            file.flush()
            progress(len(done) + count, len(records))
    return len(todo)


def example(record: Record, output: Output) -> Record:
    """A prompt and its answer as training reads them; a cut answer says so."""
    cut = {"finish_reason": "length"} if output.finish_reason == "length" else {}
    if "messages" in record:
        answer = {"role": "assistant", "content": output.text}
        return {"messages": [*record["messages"], answer], **cut}
    return {"prompt": record["prompt"], "response": output.text, **cut}


def read_prompts(path: Path) -> list[Record]:
    """The lines of a file of prompts; `ValueError` that names a bad one."""
    if not path.is_file():
        raise ValueError(f"no prompts at {str(path)!r}; give a file of JSON lines")
    lines = path.read_text(encoding="utf-8").rstrip().split("\n")
    records = [_record(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
    for number, record in enumerate(records, 1):
        match record:
            case {"prompt": str(prompt)} if prompt:
                continue
            case {"messages": [*_, {"role": str(role), "content": str()}]} if role != "assistant":
                continue
        raise ValueError(
            f"{path}:{number} needs a prompt, or messages of which the last is not the "
            f"assistant's; found {', '.join(sorted(record)) or 'nothing'}"
        )
    return records


def answered(path: Path, prompts: list[Record]) -> set[int]:
    """Lines whose answers stand in a file already; what a kill left of a last line is cut off."""
    if not path.is_file():
        return set()
    whole, end, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        path.write_bytes(whole + end)
    done = set()
    for number, text in enumerate(whole.decode("utf-8").split("\n") if whole else [], 1):
        record = _record(text, f"{path}:{number}")
        line = record.get("line")
        asked = {"prompt": record["prompt"]} if "prompt" in record else {}
        if messages := record.get("messages"):
            asked = {"messages": messages[:-1]}
        if not (isinstance(line, int) and 1 <= line <= len(prompts)) or not (
            asked.items() <= prompts[line - 1].items()
        ):
            raise ValueError(
                f"{path}:{number} answers another prompt than the input has; give another output"
            )
        done.add(line)
    return done


def _record(text: str, where: str) -> Record:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} must be an object, not {type(record).__name__}")
    return record
