"""What the turns of a side came to, beside those of another."""

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
"""Draws and tails of an interval, and the rounds below which there is none."""


def clock_of(sides: Iterable[Side]) -> Clock:
    """CPU seconds, which neighbours disturb less, unless some side runs elsewhere."""
    return "cpu" if all(side.llm.device.type == "cpu" for side in sides) else "wall"


def seconds(turn: Turn, clock: Clock) -> float:
    """One of the two times of a turn."""
    return turn.cpu if clock == "cpu" else turn.wall


def summaries(sides: Sequence[Side], rounds: int) -> list[Figures]:
    """Figures of all sides over their first rounds, each beside the first side of its load."""
    clock = clock_of(sides)
    found = []
    for side in sides:
        first = next(other for other in sides if other.load == side.load)
        whole = cost(side, rounds) if side.entry.random else result(side, rounds)
        found.append({**whole, "faster": faster(side, first, rounds, clock), "clock": clock})
    return found


def result(side: Side, rounds: int) -> Figures:
    """A result as `evaluate` writes it, and what the turns cost."""
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
    asked = side.questions[: len(report.outputs)]
    report.questions = digest(asked)
    pairs = zip(asked, report.outputs, strict=True)
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
    """What forwards cost a model of random weights; how many tokens one brings means nothing."""
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
    """Where a side stands in a sweep, and under which load."""
    outputs = [output for turn in side.turns for output in turn.outputs]
    return {
        "line": side.entry.line,
        "setting": side.entry.setting,
        "max_tokens": side.load.max_tokens,
        "prompt_length": side.load.prompt_length,
        "prompt_tokens": round(statistics.fmean(output.prompt_tokens for output in outputs), 1),
    }


def costs(turns: Sequence[Turn]) -> Figures:
    """Milliseconds of a turn per forward of the target, and of a pass of each model."""
    steps = [step for turn in turns for output in turn.outputs for step in output.steps]
    passes = {}
    for model in models([output for turn in turns for output in turn.outputs]):
        took = [1e3 * step.seconds for step in steps if step.model == model]
        rows = [step.rows for step in steps if step.model == model]
        passes[model] = {
            "p50": round(percentile(took, 0.5), 4),
            "p95": round(percentile(took, 0.95), 4),
            "rows": round(statistics.fmean(rows), 2) if rows else 0.0,
        }
    return {
        "ms_per_forward": {clock: per_forward(turns, clock) for clock in ("cpu", "wall")},
        "ms_per_pass": passes,
    }


def per_forward(turns: Sequence[Turn], clock: Clock) -> float:
    """Median over the turns of their milliseconds per forward of the target."""
    took = [1e3 * seconds(turn, clock) / turn.forwards for turn in turns if turn.forwards]
    return round(statistics.median(took), 4) if took else 0.0


def faster(side: Side, first: Side, rounds: int, clock: Clock) -> Figures | None:
    """How many times as fast a side is: the median of the ratios of the rounds, and its interval.

    By tokens per second or, of random weights, forwards per second. None for the side itself, and
    where a turn brought nothing.
    """

    def rate(turn: Turn) -> float:
        count = turn.forwards if side.entry.random else turn.tokens
        return count / seconds(turn, clock) if seconds(turn, clock) else 0.0

    mine, its = (list(map(rate, each.turns[:rounds])) for each in (side, first))
    if side is first or not all(mine) or not all(its):
        return None
    ratios = [a / b for a, b in zip(mine, its, strict=True)]
    return {"ratio": round(statistics.median(ratios), 3), "interval": interval(ratios)}


def interval(values: Sequence[float]) -> list[float] | None:
    """Interval of 95 % of a median, by the bootstrap; None of too few values."""
    if len(values) < FEWEST:
        return None
    drawn = np.random.default_rng(0).choice(values, size=(DRAWS, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), TAILS)
    return [round(float(low), 3), round(float(high), 3)]
