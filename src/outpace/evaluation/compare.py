"""Compare the results of several runs: differences with bootstrap intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.checkpoints.fields import shorten
from outpace.evaluation.metrics import SpeedAccuracy, area_under_parallelism, pareto_front
from outpace.evaluation.samples import SCHEMA_VERSION

MAX_FIGURE = 1e30
"""Upper bound of all numbers; neither infinity nor NaN is below it."""

Predicate = Callable[[Any], bool]


def is_text(value: Any) -> bool:
    """Return whether a value is a string."""
    return isinstance(value, str)


def is_finite_number(value: Any) -> bool:
    """Return whether a value is a finite, non-negative number."""
    return type(value) in (int, float) and 0 <= value < MAX_FIGURE


def is_share(value: Any) -> bool:
    """Return whether a value is between 0 and 1."""
    return is_finite_number(value) and value <= 1


def is_verdict(value: Any) -> bool:
    """Return whether a value is true, false or null (not judged)."""
    return value is None or isinstance(value, bool)


def is_null_or(fits: Predicate) -> Predicate:
    """Return a predicate that also accepts null."""
    return lambda value: value is None or fits(value)


def is_list_of(fits: Predicate, count: int) -> Predicate:
    """Return a predicate for lists of `count` values."""
    return lambda value: isinstance(value, list) and len(value) == count and all(map(fits, value))


def is_object_with(keys: Mapping[str, Predicate]) -> Predicate:
    """Return a predicate for objects whose values at some keys are valid."""
    return lambda value: (
        isinstance(value, dict) and all(k in value and fits(value[k]) for k, fits in keys.items())
    )


is_percentiles = is_object_with({"p50": is_finite_number, "p95": is_finite_number})

REQUIRED_FIELDS: dict[str, tuple[Predicate, str]] = {
    **dict.fromkeys(("task", "questions", "model", "method"), (is_text, "a text")),
    "problems": (
        lambda value: type(value) is int and 0 < value < MAX_FIGURE,
        "a whole number above 0",
    ),
    "batch": (is_finite_number, "a number"),
    "accuracy": (is_null_or(is_share), "a number from 0 to 1, or null"),
    "interval": (is_null_or(is_list_of(is_share, 2)), "two numbers from 0 to 1, or null"),
    **dict.fromkeys(("tokens_per_forward", "tokens_per_second"), (is_finite_number, "a number")),
    **dict.fromkeys(
        ("tokens_per_forward_error", "p_cache"), (is_null_or(is_finite_number), "a number or null")
    ),
    **dict.fromkeys(("latency", "first_text"), (is_percentiles, "seconds as p50 and p95")),
    "acceptance_length": (is_finite_number, "a number"),
}
"""Fields required to show or compare a result, with their predicates."""

OPTIONAL_FIELDS: dict[str, tuple[Predicate, str]] = {
    "tokens_per_cpu_second": (is_finite_number, "a number"),
    "tokens_per_cpu_second_error": (is_null_or(is_finite_number), "a number or null"),
    **dict.fromkeys(("line", "setting"), (is_text, "a text")),
    "unfinished": (is_finite_number, "a number"),
    "cut_at": (is_null_or(is_finite_number), "a number or null"),
}
"""Fields that are shown if present."""


def check_result(result: Any) -> None:
    """Raise `ValueError` for a missing or invalid field, with its name and value."""
    columns = {"right": is_verdict, "tokens": is_finite_number, "forwards": is_finite_number}
    if missing := [name for name in (*REQUIRED_FIELDS, "samples") if name not in result]:
        raise ValueError(f"has a result without {missing[0]}")
    for name, (fits, what) in {**REQUIRED_FIELDS, **OPTIONAL_FIELDS}.items():
        if name in result and not fits(result[name]):
            raise ValueError(f"has {name} {shorten(result[name])}, which must be {what}")
    count = result["problems"]
    if not is_object_with({key: is_list_of(fits, count) for key, fits in columns.items()})(
        result["samples"]
    ):
        raise ValueError(f"has samples that are not {', '.join(columns)} of {count} answers each")


ResultRecord = dict[str, Any]
BootstrapStatistic = Callable[[NDArray[np.int64]], NDArray[np.float64]]

BOOTSTRAP_SAMPLES, INTERVAL_QUANTILES = 10_000, (0.025, 0.975)


def read_results(paths: Iterable[Path]) -> list[ResultRecord]:
    """Return the results of report files.

    Raises:
        ValueError: If a file is not a report or has another schema version.
    """
    return [result for path in paths for result in read_report(path)]


def read_report(path: Path) -> list[ResultRecord]:
    """Return the results of one file."""
    try:
        results = json.loads(path.read_bytes())["results"]
        schemas = [result.get("schema") for result in results]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a report: write one with evaluate --json") from error
    for schema in schemas:
        if schema != SCHEMA_VERSION:
            raise ValueError(
                f"{path} has schema {schema}, but this version reads schema {SCHEMA_VERSION}: "
                "evaluate again"
            )
    for result in results:
        try:
            check_result(result)
        except ValueError as error:
            raise ValueError(f"{path} {error}: evaluate again") from None
    return [{**result, "file": path.name} for result in results]


def result_title(result: ResultRecord) -> str:
    """Return the model and the method of a result."""
    return f"{result['model']} {result['method']}"


def speed_accuracy(result: ResultRecord, speed: str = "tokens_per_forward") -> SpeedAccuracy:
    """Return speed and accuracy of a result."""
    return result[speed], result["accuracy"] or 0.0


def pareto_indices(results: Sequence[ResultRecord], speed: str = "tokens_per_forward") -> set[int]:
    """Return the indices of Pareto-optimal results among those on the same questions."""
    optimal: set[int] = set()
    for questions in {result["questions"] for result in results}:
        numbers = [n for n, result in enumerate(results) if result["questions"] == questions]
        optimal |= {
            numbers[n] for n in pareto_front([speed_accuracy(results[n], speed) for n in numbers])
        }
    return optimal


def accuracy_under_parallelism(results: Sequence[ResultRecord]) -> dict[str, float]:
    """Return AUP per model and method, over all settings that were judged.

    All results must be on the same questions.
    """
    lines: dict[str, list[SpeedAccuracy]] = {}
    best: dict[str, float] = {}
    for result in results:
        if result["accuracy"] is not None:
            kind = f"{result['task']}: {result['model']} {result['method'].partition('(')[0]}"
            lines.setdefault(kind, []).append(speed_accuracy(result))
            task = result["task"]
            best[task] = max(best.get(task, 0.0), result["accuracy"])
    return {
        kind: area_under_parallelism(line, best[kind.partition(":")[0]])
        for kind, line in lines.items()
    }


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two results, its 95 % interval, and a two-sided p-value."""

    value: float
    low: float
    high: float
    p: float


def bootstrap_differences(first: ResultRecord, other: ResultRecord) -> dict[str, Difference]:
    """Return differences of `other` from `first`, by a paired bootstrap over the questions.

    Compares accuracy, if both were judged, and tokens per forward.

    Raises:
        ValueError: If the questions differ.
    """
    if first["questions"] != other["questions"] or first["problems"] != other["problems"]:
        raise ValueError(
            f"{first['file']} and {other['file']} answer different questions "
            f"({first['task']}, {first['problems']}, and {other['task']}, {other['problems']}): "
            "only the same ones can be paired"
        )
    count = first["problems"]
    samples = np.random.default_rng(0).integers(count, size=(BOOTSTRAP_SAMPLES, count))
    results = {}
    if first["accuracy"] is not None and other["accuracy"] is not None:
        results["accuracy"] = bootstrap_difference(
            accuracy_statistic(first), accuracy_statistic(other), samples
        )
    results["tokens_per_forward"] = bootstrap_difference(
        speed_statistic(first), speed_statistic(other), samples
    )
    return results


def bootstrap_difference(
    first: BootstrapStatistic, other: BootstrapStatistic, samples: NDArray[np.int64]
) -> Difference:
    """Return the difference of one statistic on the same bootstrap samples."""
    whole = np.arange(samples.shape[1])[None]
    value = float((other(whole) - first(whole))[0])
    spread = other(samples) - first(samples)
    low, high = np.quantile(spread, INTERVAL_QUANTILES)
    tail = min(float(np.mean(spread <= 0)), float(np.mean(spread >= 0)))
    return Difference(value, float(low), float(high), min(2 * tail, 1.0))


def accuracy_statistic(result: ResultRecord) -> BootstrapStatistic:
    """Return the fraction of correct answers as a function of sampled indices."""
    values = np.array([bool(value) for value in result["samples"]["right"]], dtype=float)
    return lambda samples: values[samples].mean(axis=1)


def speed_statistic(result: ResultRecord) -> BootstrapStatistic:
    """Return tokens per forward as a function of sampled indices."""
    tokens, forwards = (np.array(result["samples"][key], float) for key in ("tokens", "forwards"))
    return lambda samples: (
        tokens[samples].sum(axis=1) / np.maximum(forwards[samples].sum(axis=1), 1)
    )
