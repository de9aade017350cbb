"""Sides of a comparison, measured in alternating turns so that disturbances affect all alike."""

from __future__ import annotations

import gc
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain, islice, pairwise, starmap
from pathlib import Path
from typing import Any, Literal

import numpy as np

from outpace.api.llm import LLM
from outpace.api.options import Options
from outpace.api.output import Output
from outpace.field_types import check_at_least_one, list_options
from outpace.jsonl import JsonRecord
from outpace.lab.entry import MethodEntry
from outpace.lab.metrics import model_roles, percentiles
from outpace.lab.protocol import Question
from outpace.lab.report import EvaluationReport
from outpace.lab.samples import (
    Samples,
    output_from_record,
    output_record,
    questions_hash,
    resume_samples,
)
from outpace.methods import Method


def prompts_of_length(llm: LLM, questions: Sequence[Question], length: int) -> list[Question]:
    """Return a prompt of `length` tokens per question, to be answered without scoring.

    A prompt is the question's tokens followed by those of the next questions, truncated.
    """
    texts = [llm.text.encode(question.prompt, raw=True) for question in questions]
    prompts = (cut_prompt(texts, number, length) for number in range(len(texts)))
    return [Question(prompt, None, "none") for prompt in prompts]


def cut_prompt(texts: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    rotated = [*texts[first:], *texts[:first]]
    repeats = -(-length // max(sum(map(len, texts)), 1))
    return list(islice(chain.from_iterable(rotated * repeats), length))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLoad:
    """Number of concurrent requests, and their lengths in tokens.

    `max_tokens` is None if the protocol sets it, and `prompt_length` if prompts are the questions
    of a task.
    """

    batch: int
    max_tokens: int | None = None
    prompt_length: int | None = None


@dataclass(frozen=True, slots=True)
class SideTurn:
    """Answers of one turn, and its seconds of CPU time of all threads and of wall time."""

    outputs: list[Output]
    cpu: float
    wall: float

    @property
    def tokens(self) -> int:
        return sum(len(output.ids) for output in self.outputs)

    @property
    def forwards(self) -> int:
        return sum(output.forwards for output in self.outputs)


TurnClock = Literal["cpu", "wall"]


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
    clock: TurnClock = field(init=False)

    def __post_init__(self) -> None:
        """Set the clock: that of the CPU, which other processes disturb less, where it can be."""
        self.clock = "cpu" if self.llm.device.type == "cpu" else "wall"

    def unload(self) -> None:
        """Release the model, once all turns are complete."""
        del self.llm

    def answer_questions(self, questions: Sequence[Question]) -> list[Output]:
        requests = ((question.prompt, self.options) for question in questions)
        outputs = dict(self.llm.serve(requests, batch=self.load.batch))
        return [outputs[number] for number in sorted(outputs)]

    def run_turn(self, questions: Sequence[Question]) -> SideTurn:
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


def check_rounds(count: int, rounds: int, batch: int) -> None:
    """Raise `ValueError` if the questions of a round do not fill a batch."""
    check_at_least_one(rounds=rounds)
    if count // rounds < batch:
        raise ValueError(
            f"{count} questions in {rounds} rounds do not fill a batch of {batch}; "
            f"use at least {batch * rounds} questions, or fewer rounds"
        )


def open_turns(side: Side, rounds: int, folder: Path | None) -> AbstractContextManager[Samples]:
    header = side.resume_header(rounds)
    name = hashlib.sha256(json.dumps(header, sort_keys=True, default=str).encode()).hexdigest()
    return resume_samples(folder and folder / f"{name[:16]}.jsonl", header)


def turn_from_record(record: JsonRecord) -> SideTurn:
    try:
        outputs = [output_from_record(output) for output in record["outputs"]]
        return SideTurn(outputs, float(record["cpu"]), float(record["wall"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a line of the samples is not a valid turn: {error!r}") from error


def alternate_turns(
    sides: Sequence[Side],
    rounds: int,
    *,
    samples: Path | None = None,
    warm_up: bool = True,
    progress: Callable[[Side], None] = lambda side: None,
) -> Iterator[int]:
    """Run the sides' turns in alternating order; yield the number of complete rounds.

    Each round uses a part of the questions, of which all sides have equally many. Before its first
    turn, each side answers a batch as `warm_up`. `samples` is a folder that stores the turns, from
    which an interrupted run resumes.
    """
    check_rounds(len(sides[0].questions), rounds, max(side.load.batch for side in sides))
    with ExitStack() as stack:
        stored = [stack.enter_context(open_turns(side, rounds, samples)) for side in sides]
        warm = set() if warm_up else {*range(len(sides))}
        edges = [len(sides[0].questions) * number // rounds for number in range(rounds + 1)]
        for number, part in enumerate(starmap(slice, pairwise(edges))):
            for index in range(len(sides))[:: -1 if number % 2 else 1]:
                side, before = sides[index], stored[index]
                if number in before.records:
                    side.turns.append(turn_from_record(before.records[number]))
                else:
                    if index not in warm:
                        side.answer_questions(side.questions[: side.load.batch])
                    warm.add(index)
                    turn = side.run_turn(side.questions[part])
                    outputs = [output_record(output) for output in turn.outputs]
                    record = {"cpu": turn.cpu, "wall": turn.wall, "outputs": outputs}
                    before.add_record(number, record)
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


SideFigures = dict[str, Any]

DRAWS, TAILS, FEWEST = 2000, (0.025, 0.975), 5
"""Bootstrap draws and tails of an interval, and the minimum number of rounds for one."""


def turn_seconds(turn: SideTurn, clock: TurnClock) -> float:
    return turn.cpu if clock == "cpu" else turn.wall


def summarise_sides(sides: Sequence[Side], rounds: int) -> list[SideFigures]:
    """Return the figures of all sides, with speed relative to the first side of the same load."""
    clock: TurnClock = "cpu" if all(each.clock == "cpu" for each in sides) else "wall"
    found = []
    for side in sides:
        first = next(other for other in sides if other.load == side.load)
        found.append(
            {
                **scored_figures(side, rounds),
                "faster": relative_speed(side, first, rounds, clock),
                "faster_wall": relative_speed(side, first, rounds, "wall"),
                "clock": clock,
            }
        )
    return found


def scored_figures(side: Side, rounds: int) -> SideFigures:
    """Return a result in the format of `evaluate`, with the costs of the turns."""
    turns = side.turns[:rounds]
    report = EvaluationReport(
        task=side.task,
        protocol=side.protocol,
        model=side.entry.model,
        method=repr(side.entry.method),
        batch=side.load.batch,
        seconds=sum(turn.wall for turn in turns),
    )
    for turn in turns:
        for output in turn.outputs:
            report.add_answer(output, None)
    questions = side.questions[: len(report.outputs)]
    report.questions = questions_hash(questions)
    pairs = zip(questions, report.outputs, strict=True)
    report.verdicts = [question.judge_answer(output.text) for question, output in pairs]
    cpu = sum(turn.cpu for turn in turns)
    return {
        **report.to_record(),
        **sweep_figures(side),
        **turn_costs(turns),
        "tokens_per_cpu_second": round(report.token_count / cpu, 1) if cpu else 0.0,
        "cpu_seconds": round(cpu, 3),
    }


def has_auto_length(method: Method) -> bool:
    """Return whether the speed of passes sets the draft length, and so the tokens per forward."""
    return any(getattr(method, option) == "auto" for option in list_options(type(method)))


def sweep_figures(side: Side) -> SideFigures:
    outputs = [output for turn in side.turns for output in turn.outputs]
    return {
        "line": side.entry.line,
        "setting": side.entry.setting,
        "is_auto": has_auto_length(side.entry.method),
        "max_tokens": side.options["max_tokens"],
        "prompt_length": side.load.prompt_length,
        "prompt_tokens": round(statistics.fmean(output.prompt_tokens for output in outputs), 1),
    }


def turn_costs(turns: Sequence[SideTurn]) -> SideFigures:
    steps = [step for turn in turns for output in turn.outputs for step in output.steps]
    passes = {}
    for model in model_roles([output for turn in turns for output in turn.outputs]):
        times = [1e3 * step.seconds for step in steps if step.model == model]
        rows = [step.rows for step in steps if step.model == model]
        passes[model] = {
            **percentiles(times, 4),
            "rows": round(statistics.fmean(rows), 2) if rows else 0.0,
        }
    return {
        "ms_per_forward": {
            clock: milliseconds_per_forward(turns, clock) for clock in ("cpu", "wall")
        },
        "ms_per_pass": passes,
    }


def milliseconds_per_forward(turns: Sequence[SideTurn], clock: TurnClock) -> float:
    times = [1e3 * turn_seconds(turn, clock) / turn.forwards for turn in turns if turn.forwards]
    return round(statistics.median(times), 4) if times else 0.0


def relative_speed(side: Side, first: Side, rounds: int, clock: TurnClock) -> SideFigures | None:
    """Return the speed relative to `first`: median of the rounds' ratios, with its interval.

    Speed is tokens per second. None for `first` itself, and if a turn has no tokens.
    """

    def turn_rate(turn: SideTurn) -> float:
        return turn.tokens / turn_seconds(turn, clock) if turn_seconds(turn, clock) else 0.0

    rates, base_rates = (list(map(turn_rate, each.turns[:rounds])) for each in (side, first))
    if side is first or not all(rates) or not all(base_rates):
        return None
    ratios = [a / b for a, b in zip(rates, base_rates, strict=True)]
    return {"ratio": round(statistics.median(ratios), 3), "interval": median_interval(ratios)}


def median_interval(values: Sequence[float]) -> list[float] | None:
    """Return the 95 % bootstrap interval of a median; None for too few values."""
    if len(values) < FEWEST:
        return None
    drawn = np.random.default_rng(0).choice(values, size=(DRAWS, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), TAILS)
    return [round(float(low), 3), round(float(high), 3)]
