"""Reports of several runs beside one another: what differs, and by how much that may be chance."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.evaluation.figures import check
from outpace.evaluation.metrics import Point, aup, front
from outpace.evaluation.samples import SCHEMA

Result = dict[str, Any]
Statistic = Callable[[NDArray[np.int64]], NDArray[np.float64]]

DRAWS, TAILS = 10_000, (0.025, 0.975)


def read_results(paths: Iterable[Path]) -> list[Result]:
    """The results of report files; `ValueError` for one that is none, or of another schema."""
    return [result for path in paths for result in results_of(path)]


def results_of(path: Path) -> list[Result]:
    """The results of one file."""
    try:
        results = json.loads(path.read_bytes())["results"]
        schemas = [result.get("schema") for result in results]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no report: write one with evaluate --json") from error
    for schema in schemas:
        if schema != SCHEMA:
            raise ValueError(
                f"{path} is a report of schema {schema}, and this version reads schema {SCHEMA}: "
                "evaluate again"
            )
    for result in results:
        try:
            check(result)
        except ValueError as error:
            raise ValueError(f"{path} {error}: evaluate again") from None
    return [{**result, "file": path.name} for result in results]


def named(result: Result) -> str:
    """What ran, and where it is written."""
    return f"{result['model']} {result['method']}"


def point(result: Result, speed: str = "tokens_per_forward") -> Point:
    """Where a result stands between fast and right."""
    return result[speed], result["accuracy"] or 0.0


def fronts(results: Sequence[Result], speed: str = "tokens_per_forward") -> set[int]:
    """Numbers of the results that no other one on the same questions beats, by some speed."""
    found: set[int] = set()
    for questions in {result["questions"] for result in results}:
        numbers = [n for n, result in enumerate(results) if result["questions"] == questions]
        found |= {numbers[n] for n in front([point(results[n], speed) for n in numbers])}
    return found


def areas(results: Sequence[Result]) -> dict[str, float]:
    """Accuracy under parallelism of each model with each method, over all of its settings.

    Only of results that were judged, on the same questions.
    """
    lines: dict[str, list[Point]] = {}
    best: dict[str, float] = {}
    for result in results:
        if result["accuracy"] is not None:
            kind = f"{result['task']}: {result['model']} {result['method'].partition('(')[0]}"
            lines.setdefault(kind, []).append(point(result))
            task = result["task"]
            best[task] = max(best.get(task, 0.0), result["accuracy"])
    return {kind: aup(line, best[kind.partition(":")[0]]) for kind, line in lines.items()}


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a result lies above another, its interval of 95 %, and a p-value of two sides."""

    value: float
    low: float
    high: float
    p: float


def differences(first: Result, other: Result, seed: int = 0) -> dict[str, Difference]:
    """How `other` differs from `first`, by the paired bootstrap over their questions.

    Differences of accuracy, where both were judged, and of tokens per forward. Raises `ValueError`
    where they answered different questions.
    """
    if first["questions"] != other["questions"] or first["problems"] != other["problems"]:
        raise ValueError(
            f"{first['file']} and {other['file']} answer different questions "
            f"({first['task']}, {first['problems']}, and {other['task']}, {other['problems']}): "
            "only the same ones can be paired"
        )
    count = first["problems"]
    drawn = np.random.default_rng(seed).integers(count, size=(DRAWS, count))
    found = {}
    if first["accuracy"] is not None and other["accuracy"] is not None:
        found["accuracy"] = difference(right(first), right(other), drawn)
    found["tokens_per_forward"] = difference(speed(first), speed(other), drawn)
    return found


def difference(first: Statistic, other: Statistic, drawn: NDArray[np.int64]) -> Difference:
    """Of one figure, on the same samples again and again."""
    whole = np.arange(drawn.shape[1])[None]
    value = float((other(whole) - first(whole))[0])
    spread = other(drawn) - first(drawn)
    low, high = np.quantile(spread, TAILS)
    tail = min(float(np.mean(spread <= 0)), float(np.mean(spread >= 0)))
    return Difference(value, float(low), float(high), min(2 * tail, 1.0))


def right(result: Result) -> Statistic:
    """Share of right answers among some samples."""
    values = np.array([bool(value) for value in result["samples"]["right"]], dtype=float)
    return lambda drawn: values[drawn].mean(axis=1)


def speed(result: Result) -> Statistic:
    """Tokens over forwards of some samples."""
    tokens, forwards = (np.array(result["samples"][key], float) for key in ("tokens", "forwards"))
    return lambda drawn: tokens[drawn].sum(axis=1) / np.maximum(forwards[drawn].sum(axis=1), 1)
