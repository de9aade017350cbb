"""Sides of a comparison, measured in alternating turns so that disturbances affect all alike."""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outpace.api.llm import LLM
from outpace.api.options import Options
from outpace.api.output import Output
from outpace.benchmark.entry import MethodEntry
from outpace.evaluation.question import Question
from outpace.evaluation.samples import (
    Samples,
    output_from_record,
    output_record,
    questions_hash,
    resume_samples,
)
from outpace.jsonl import JsonRecord
from outpace.methods.bounds import check_at_least_one


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLoad:
    """Number of concurrent requests, and their lengths in tokens.

    `prompt_length` is None if prompts are the questions of a task.
    """

    batch: int
    max_tokens: int
    prompt_length: int | None = None


@dataclass(frozen=True, slots=True)
class SideTurn:
    """Answers of one turn, and its seconds of CPU time of all threads and of wall time."""

    outputs: list[Output]
    cpu: float
    wall: float

    @property
    def tokens(self) -> int:
        """Number of output tokens."""
        return sum(len(output.ids) for output in self.outputs)

    @property
    def forwards(self) -> int:
        """Number of forwards of the target."""
        return sum(output.forwards for output in self.outputs)


@dataclass(slots=True, kw_only=True)
class Side:
    """An entry under one load, and its turns so far."""

    entry: MethodEntry
    llm: LLM
    load: RequestLoad
    questions: Sequence[Question]
    options: Options
    task: str = ""
    protocol: str = ""
    turns: list[SideTurn] = field(default_factory=list)

    def answer_questions(self, questions: Sequence[Question]) -> list[Output]:
        """Return answers in the order of the questions."""
        requests = ((question.prompt, self.options) for question in questions)
        outputs = dict(self.llm.serve(requests, batch=self.load.batch))
        return [outputs[number] for number in sorted(outputs)]

    def run_turn(self, questions: Sequence[Question]) -> SideTurn:
        """Answer questions as a timed turn."""
        with freeze_garbage():
            cpu, wall = time.process_time(), time.perf_counter()
            outputs = self.answer_questions(questions)
            turn = SideTurn(outputs, time.process_time() - cpu, time.perf_counter() - wall)
        self.turns.append(turn)
        return turn

    def resume_header(self, rounds: int) -> dict[str, Any]:
        """Return what another run must have in common to resume this side's turns."""
        options = {key: value for key, value in self.options.items() if key != "method"}
        return {
            "entry": self.entry.name,
            "method": repr(self.entry.method),
            "load": asdict(self.load),
            "questions": questions_hash(self.questions),
            "options": options,
            "rounds": rounds,
        }


def split_questions(count: int, rounds: int) -> list[slice]:
    """Split `count` questions into contiguous parts, whose sizes differ by at most one."""
    edges = [count * number // rounds for number in range(rounds + 1)]
    return [slice(begin, end) for begin, end in zip(edges, edges[1:], strict=False)]


def check_rounds(count: int, rounds: int, batch: int) -> None:
    """Raise `ValueError` if the questions of a round do not fill a batch."""
    check_at_least_one(rounds=rounds)
    if count // rounds < batch:
        raise ValueError(
            f"{count} questions in {rounds} rounds do not fill a batch of {batch}; "
            f"use at least {batch * rounds} questions, or fewer rounds"
        )


def open_turns(side: Side, rounds: int, folder: Path | None) -> AbstractContextManager[Samples]:
    """Open the file in `folder` with a side's turns of an earlier run, to append to it."""
    header = side.resume_header(rounds)
    name = hashlib.sha256(json.dumps(header, sort_keys=True, default=str).encode()).hexdigest()
    return resume_samples(folder and folder / f"{name[:16]}.jsonl", header)


def turn_from_record(record: JsonRecord) -> SideTurn:
    """Convert a line of the file to a turn; `ValueError` if it is malformed."""
    try:
        outputs = [output_from_record(output) for output in record["outputs"]]
        return SideTurn(outputs, float(record["cpu"]), float(record["wall"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a line of the samples is not a valid turn: {error!r}") from error


def turn_to_record(turn: SideTurn) -> JsonRecord:
    """Convert a turn to a line of the file."""
    outputs = [output_record(output) for output in turn.outputs]
    return {"cpu": turn.cpu, "wall": turn.wall, "outputs": outputs}


def alternate_turns(
    sides: Sequence[Side],
    rounds: int,
    *,
    samples: Path | None = None,
    progress: Callable[[Side], None] = lambda side: None,
) -> Iterator[int]:
    """Run the sides' turns in alternating order; yield the number of complete rounds.

    Each round uses a part of the questions, of which all sides have equally many. Before its first
    turn, each side answers a warm-up batch. `samples` is a folder that stores the turns, from
    which an interrupted run resumes.

    Raises:
        ValueError: the questions of a round do not fill a batch.
    """
    check_rounds(len(sides[0].questions), rounds, max(side.load.batch for side in sides))
    with ExitStack() as stack:
        stored = [stack.enter_context(open_turns(side, rounds, samples)) for side in sides]
        warm: set[int] = set()
        for number, part in enumerate(split_questions(len(sides[0].questions), rounds)):
            for index in range(len(sides))[:: -1 if number % 2 else 1]:
                side, before = sides[index], stored[index]
                if number in before.records:
                    side.turns.append(turn_from_record(before.records[number]))
                else:
                    if index not in warm:
                        side.answer_questions(side.questions[: side.load.batch])
                    warm.add(index)
                    before.add_record(number, turn_to_record(side.run_turn(side.questions[part])))
                progress(side)
            yield number + 1


@contextmanager
def freeze_garbage() -> Iterator[None]:
    """Freeze existing objects, so that those of other sides do not slow garbage collection."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
