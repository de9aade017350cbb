"""Compare the results of several runs: differences with bootstrap intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.lab.metrics import SpeedAccuracy, pareto_front
from outpace.lab.samples import SCHEMA_VERSION

REQUIRED_FIELDS = {
    *("task", "questions", "model", "method", "problems", "batch", "accuracy", "interval"),
    *("tokens_per_forward", "tokens_per_forward_error", "tokens_per_second", "p_cache"),
    *("acceptance_length", "latency", "first_text", "samples"),
}
"""Fields required to show or compare a result."""

ResultRecord = dict[str, Any]
RatioParts = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Numerator and denominator of a figure, of each question."""

BOOTSTRAP_SAMPLES, INTERVAL_QUANTILES = 10_000, (0.025, 0.975)


def read_results(paths: Iterable[Path]) -> list[ResultRecord]:
    """Return the results of report files."""
    return [result for path in paths for result in read_report(path)]


def read_report(path: Path) -> list[ResultRecord]:
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
        if missing := REQUIRED_FIELDS - set(result):
            raise ValueError(f"{path} has a result without {min(missing)}: evaluate again")
    return [{**result, "file": path.name} for result in results]


def result_title(result: ResultRecord) -> str:
    """Return the line and the setting of a result in a sweep, else its model and method."""
    if "line" in result:
        return f"{result['line']} {result.get('setting', '')}".rstrip()
    return f"{result['model']} {result['method']}"


def speed_accuracy(result: ResultRecord, speed: str = "tokens_per_forward") -> SpeedAccuracy:
    """Return speed and accuracy, or the likelihood of a judged result."""
    return result[speed], result.get("likelihood", result["accuracy"]) or 0.0


def pareto_indices(results: Sequence[ResultRecord], speed: str = "tokens_per_forward") -> set[int]:
    """Return the indices of Pareto-optimal results among those on the same questions."""
    optimal: set[int] = set()
    for questions in {result["questions"] for result in results}:
        numbers = [n for n, result in enumerate(results) if result["questions"] == questions]
        optimal |= {
            numbers[n] for n in pareto_front([speed_accuracy(results[n], speed) for n in numbers])
        }
    return optimal


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two results, its 95 % interval, and a two-sided p-value."""

    value: float
    low: float
    high: float
    p: float


def bootstrap_differences(
    first: ResultRecord,
    other: ResultRecord,
    parts_of: Callable[[ResultRecord], Mapping[str, RatioParts]] | None = None,
) -> dict[str, Difference]:
    """Return differences of `other` from `first`, by a paired bootstrap over the questions.

    Compares the figures of `parts_of`, which are those of `ratio_parts` by default: accuracy, if
    both were judged, tokens per forward, and the likelihood and acceptance length, if both have
    those of their answers.
    """
    if first["questions"] != other["questions"] or first["problems"] != other["problems"]:
        raise ValueError(
            f"{first['file']} and {other['file']} answer different questions "
            f"({first['task']}, {first['problems']}, and {other['task']}, {other['problems']}): "
            "only the same ones can be paired"
        )
    count = first["problems"]
    samples = np.random.default_rng(0).integers(count, size=(BOOTSTRAP_SAMPLES, count))
    parts, others = map(parts_of or ratio_parts, (first, other))
    return {
        figure: bootstrap_difference(parts[figure], others[figure], samples)
        for figure in parts
        if figure in others
    }


def ratio_parts(result: ResultRecord) -> dict[str, RatioParts]:
    """Return the figures of a result as numerators and denominators of its questions."""
    samples = {name: np.array(values, float) for name, values in result["samples"].items()}
    parts = {"tokens_per_forward": (samples["tokens"], samples["forwards"])}
    if result["accuracy"] is not None:
        right = np.nan_to_num(samples["right"])  # NaN for an answer that is not judged
        parts = {"accuracy": (right, np.ones_like(right)), **parts}
    if "likelihood" in samples:
        parts["likelihood"] = samples["likelihood"], samples["judged"]
    if "acceptance" in samples:
        accepted = samples["acceptance"]  # NaN for an answer of one target forward
        parts["acceptance_length"] = np.nan_to_num(accepted), (~np.isnan(accepted)).astype(float)
    return parts


def bootstrap_interval(result: ResultRecord, figure: str) -> tuple[float, float]:
    """Return the 95 % interval of a figure of `ratio_parts`, by a bootstrap over the questions."""
    count = result["problems"]
    samples = np.random.default_rng(0).integers(count, size=(BOOTSTRAP_SAMPLES, count))
    low, high = np.quantile(ratios(ratio_parts(result)[figure], samples), INTERVAL_QUANTILES)
    return float(low), float(high)


def ratios(parts: RatioParts, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
    above, below = (values[chosen].sum(axis=1) for values in parts)
    return above / np.maximum(below, 1)


def bootstrap_difference(
    first: RatioParts, other: RatioParts, samples: NDArray[np.int64]
) -> Difference:
    whole = np.arange(samples.shape[1])[None]
    value = float((ratios(other, whole) - ratios(first, whole))[0])
    spread = ratios(other, samples) - ratios(first, samples)
    low, high = np.quantile(spread, INTERVAL_QUANTILES)
    tail = min(float(np.mean(spread <= 0)), float(np.mean(spread >= 0)))
    return Difference(value, float(low), float(high), min(2 * tail, 1.0))
