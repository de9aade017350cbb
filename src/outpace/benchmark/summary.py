"""Figures of sides, and their speed relative to the first side."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from outpace.benchmark.side import Side, SideTurn
from outpace.checkpoints.name import short_title
from outpace.evaluation.metrics import model_roles, quantile_value
from outpace.evaluation.report import EvaluationReport
from outpace.evaluation.samples import SCHEMA_VERSION, questions_hash

TurnClock = Literal["cpu", "wall"]
SideFigures = dict[str, Any]

DRAWS, TAILS, FEWEST = 2000, (0.025, 0.975), 5
"""Bootstrap draws and tails of an interval, and the minimum number of rounds for one."""


def choose_clock(sides: Iterable[Side]) -> TurnClock:
    """Choose CPU time, which other processes disturb less, unless a side uses another device."""
    return "cpu" if all(side.llm.device.type == "cpu" for side in sides) else "wall"


def turn_seconds(turn: SideTurn, clock: TurnClock) -> float:
    """Return the CPU or wall seconds of a turn."""
    return turn.cpu if clock == "cpu" else turn.wall


def summarise_sides(sides: Sequence[Side], rounds: int) -> list[SideFigures]:
    """Return the figures of all sides, with speed relative to the first side of the same load."""
    clock = choose_clock(sides)
    found = []
    for side in sides:
        first = next(other for other in sides if other.load == side.load)
        figures = (
            cost_figures(side, rounds)
            if side.entry.has_random_weights
            else scored_figures(side, rounds)
        )
        found.append(
            {**figures, "faster": relative_speed(side, first, rounds, clock), "clock": clock}
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


def cost_figures(side: Side, rounds: int) -> SideFigures:
    """Return the costs of a model with random weights, whose accepted tokens are meaningless."""
    turns = side.turns[:rounds]
    return {
        "schema": SCHEMA_VERSION,
        "model": short_title(side.entry.model),
        "method": repr(side.entry.method),
        "batch": side.load.batch,
        "problems": sum(len(turn.outputs) for turn in turns),
        **sweep_figures(side),
        **turn_costs(turns),
    }


def sweep_figures(side: Side) -> SideFigures:
    """Return a side's line and setting in a sweep, and its load."""
    outputs = [output for turn in side.turns for output in turn.outputs]
    return {
        "line": side.entry.line,
        "setting": side.entry.setting,
        "max_tokens": side.load.max_tokens,
        "prompt_length": side.load.prompt_length,
        "prompt_tokens": round(statistics.fmean(output.prompt_tokens for output in outputs), 1),
    }


def turn_costs(turns: Sequence[SideTurn]) -> SideFigures:
    """Return milliseconds per forward of the target, and per pass of each model."""
    steps = [step for turn in turns for output in turn.outputs for step in output.steps]
    passes = {}
    for model in model_roles([output for turn in turns for output in turn.outputs]):
        times = [1e3 * step.seconds for step in steps if step.model == model]
        rows = [step.rows for step in steps if step.model == model]
        passes[model] = {
            "p50": round(quantile_value(times, 0.5), 4),
            "p95": round(quantile_value(times, 0.95), 4),
            "rows": round(statistics.fmean(rows), 2) if rows else 0.0,
        }
    return {
        "ms_per_forward": {
            clock: milliseconds_per_forward(turns, clock) for clock in ("cpu", "wall")
        },
        "ms_per_pass": passes,
    }


def milliseconds_per_forward(turns: Sequence[SideTurn], clock: TurnClock) -> float:
    """Return the median over turns of milliseconds per forward of the target."""
    times = [1e3 * turn_seconds(turn, clock) / turn.forwards for turn in turns if turn.forwards]
    return round(statistics.median(times), 4) if times else 0.0


def relative_speed(side: Side, first: Side, rounds: int, clock: TurnClock) -> SideFigures | None:
    """Return the speed relative to `first`: median of the rounds' ratios, with its interval.

    Speed is tokens per second or, with random weights, forwards per second. None for `first`
    itself, and if a turn has no tokens.
    """

    def turn_rate(turn: SideTurn) -> float:
        count = turn.forwards if side.entry.has_random_weights else turn.tokens
        return count / turn_seconds(turn, clock) if turn_seconds(turn, clock) else 0.0

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
