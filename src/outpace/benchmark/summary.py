"""Figures of sides, and their speed relative to the first side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from outpace.benchmark.side import Side, Turn
from outpace.checkpoints.name import short_title
from outpace.evaluation.metrics import models, percentile
from outpace.evaluation.report import Report
from outpace.evaluation.samples import SCHEMA, digest

Clock = Literal["cpu", "wall"]
Figures = dict[str, Any]
Rate = Callable[[Turn], float]

DRAWS, TAILS, FEWEST = 2000, (0.025, 0.975), 5
"""Bootstrap draws and tails of an interval, and the minimum number of rounds for one."""


def clock_of(sides: Iterable[Side]) -> Clock:
    """Choose CPU time, which other processes disturb less, unless a side uses another device."""
    return "cpu" if all(side.llm.device.type == "cpu" for side in sides) else "wall"


def seconds(turn: Turn, clock: Clock) -> float:
    """Return the CPU or wall seconds of a turn."""
    return turn.cpu if clock == "cpu" else turn.wall


def summaries(sides: Sequence[Side], rounds: int) -> list[Figures]:
    """Return the figures of all sides, with speed relative to the first side of the same load."""
    clock = clock_of(sides)
    found = []
    for side in sides:
        first = next(other for other in sides if other.load == side.load)
        figures = cost(side, rounds) if side.entry.random else result(side, rounds)
        found.append({**figures, "faster": faster(side, first, rounds, clock), "clock": clock})
    return found


def result(side: Side, rounds: int) -> Figures:
    """Return a result in the format of `evaluate`, with the costs of the turns."""
    turns = side.turns[:rounds]
    report = Report(
        task=side.task,
        protocol=side.protocol,
        model=side.entry.model,
        method=repr(side.entry.method),
        batch=side.load.batch,
        seconds=sum(turn.wall for turn in turns),
    )
    for turn in turns:
        for output in turn.outputs:
            report.add(output, None)
    questions = side.questions[: len(report.outputs)]
    report.questions = digest(questions)
    pairs = zip(questions, report.outputs, strict=True)
    report.verdicts = [question.right(output.text) for question, output in pairs]
    cpu = sum(turn.cpu for turn in turns)
    return {
        **report.summary(),
        **placed(side),
        **costs(turns),
        "tokens_per_cpu_second": round(report.tokens / cpu, 1) if cpu else 0.0,
        "cpu_seconds": round(cpu, 3),
    }


def cost(side: Side, rounds: int) -> Figures:
    """Return the costs of a model with random weights, whose accepted tokens are meaningless."""
    turns = side.turns[:rounds]
    return {
        "schema": SCHEMA,
        "model": short_title(side.entry.model),
        "method": repr(side.entry.method),
        "batch": side.load.batch,
        "problems": sum(len(turn.outputs) for turn in turns),
        **placed(side),
        **costs(turns),
    }


def placed(side: Side) -> Figures:
    """Return a side's line and setting in a sweep, and its load."""
    outputs = [output for turn in side.turns for output in turn.outputs]
    return {
        "line": side.entry.line,
        "setting": side.entry.setting,
        "max_tokens": side.load.max_tokens,
        "prompt_length": side.load.prompt_length,
        "prompt_tokens": round(statistics.fmean(output.prompt_tokens for output in outputs), 1),
    }


def costs(turns: Sequence[Turn]) -> Figures:
    """Return milliseconds per forward of the target, and per pass of each model."""
    steps = [step for turn in turns for output in turn.outputs for step in output.steps]
    passes = {}
    for model in models([output for turn in turns for output in turn.outputs]):
        times = [1e3 * step.seconds for step in steps if step.model == model]
        rows = [step.rows for step in steps if step.model == model]
        passes[model] = {
            "p50": round(percentile(times, 0.5), 4),
            "p95": round(percentile(times, 0.95), 4),
            "rows": round(statistics.fmean(rows), 2) if rows else 0.0,
        }
    return {
        "ms_per_forward": {clock: per_forward(turns, clock) for clock in ("cpu", "wall")},
        "ms_per_pass": passes,
    }


def per_forward(turns: Sequence[Turn], clock: Clock) -> float:
    """Return the median over turns of milliseconds per forward of the target."""
    times = [1e3 * seconds(turn, clock) / turn.forwards for turn in turns if turn.forwards]
    return round(statistics.median(times), 4) if times else 0.0


def faster(side: Side, first: Side, rounds: int, clock: Clock) -> Figures | None:
    """Return the speed relative to `first`: median of the rounds' ratios, with its interval.

    Speed is tokens per second or, with random weights, forwards per second. None for `first`
    itself, and if a turn has no tokens.
    """

    def rate(turn: Turn) -> float:
        count = turn.forwards if side.entry.random else turn.tokens
        return count / seconds(turn, clock) if seconds(turn, clock) else 0.0

    rates, base_rates = (list(map(rate, each.turns[:rounds])) for each in (side, first))
    if side is first or not all(rates) or not all(base_rates):
        return None
    ratios = [a / b for a, b in zip(rates, base_rates, strict=True)]
    return {"ratio": round(statistics.median(ratios), 3), "interval": interval(ratios)}


def interval(values: Sequence[float]) -> list[float] | None:
    """Return the 95 % bootstrap interval of a median; None for too few values."""
    if len(values) < FEWEST:
        return None
    drawn = np.random.default_rng(0).choice(values, size=(DRAWS, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), TAILS)
    return [round(float(low), 3), round(float(high), 3)]
