"""Metrics of a run, computed from the traces of its answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from outpace.api.output import Output

NORMAL_QUANTILE_95 = 1.959964
"""Standard deviations that contain 95 % of a normal distribution."""


def wilson_interval(correct: int, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval for a proportion (Wilson, 1927); (0, 1) for count 0."""
    if count == 0:
        return 0.0, 1.0
    share, square = correct / count, NORMAL_QUANTILE_95**2 / count
    center = (share + square / 2) / (1 + square)
    half = (
        NORMAL_QUANTILE_95
        * math.sqrt(share * (1 - share) / count + square / 4 / count)
        / (1 + square)
    )
    return max(center - half, 0.0), min(center + half, 1.0)


def ratio_error(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the standard error of a ratio of sums over independent samples, by linearisation.

    NaN for fewer than two samples.
    """
    count, total = len(above), sum(below)
    if count < 2 or not total:
        return math.nan
    ratio = sum(above) / total
    squares = sum((a - ratio * b) ** 2 for a, b in zip(above, below, strict=True))
    return math.sqrt(count / (count - 1) * squares) / total


def accepted_lengths(output: Output) -> list[int]:
    """Return the number of tokens committed from each forward of the target to the next.

    A first forward without holes is a prefill and does not count.
    """
    lengths: list[int] = []
    target = [step for step in output.steps if step.model == "target"]
    for step in output.steps:
        if step.model == "target":
            lengths.append(0)
        if lengths:
            lengths[-1] += step.committed
    return lengths if target and target[0].holes else lengths[1:]


def mean_acceptance(output: Output) -> float | None:
    """Return the mean tokens accepted per target forward of an answer; None without a forward."""
    lengths = accepted_lengths(output)
    return sum(lengths) / len(lengths) if lengths else None


def acceptance_length(outputs: Sequence[Output]) -> float:
    """Return the mean of `mean_acceptance` over answers (DFlash)."""
    means = [mean for mean in map(mean_acceptance, outputs) if mean is not None]
    return sum(means) / len(means) if means else 0.0


def acceptance_histogram(outputs: Sequence[Output]) -> list[int]:
    """Return how many target forwards accepted 0, 1, 2 … tokens."""
    counts = Counter(length for output in outputs for length in accepted_lengths(output))
    return [counts[length] for length in range(max(counts, default=-1) + 1)]


def acceptance_by_position(counts: Sequence[int]) -> list[float]:
    """Return the shares of forwards that accepted at least 1, 2 … tokens."""
    total = sum(counts)
    return (
        [accepted / total for accepted in accumulate(reversed(counts[1:]))][::-1] if total else []
    )


def count_fed_rows(output: Output, model: str = "target") -> int:
    """Return the number of rows fed to a model after the prompt."""
    rows = sum(step.rows for step in output.steps if step.model == model)
    return max(rows - output.prompt_tokens, 0)


def token_row_ratio(outputs: Sequence[Output]) -> float | None:
    """Return tokens per target row after the prompt (WeDLM, equation 4); None without rows."""
    rows = sum(map(count_fed_rows, outputs))
    return sum(len(output.ids) for output in outputs) / rows if rows else None


def count_wasted_rows(outputs: Sequence[Output]) -> int:
    """Return the number of target rows in excess of the prompt's rows and one per token."""
    return sum(max(count_fed_rows(output) - len(output.ids), 0) for output in outputs)


def first_text_seconds(output: Output) -> float:
    """Return the seconds up to and including the first pass that committed a token."""
    seconds = 0.0
    for step in output.steps:
        seconds += step.seconds
        if step.committed:
            break
    return seconds


def percentiles(values: Sequence[float], digits: int) -> dict[str, float]:
    """Return the rounded median and 95th percentile of the values; 0 if there are none."""
    found = np.percentile(values or [0.0], (50, 95))
    return {
        name: round(float(each), digits) for name, each in zip(("p50", "p95"), found, strict=True)
    }


def model_roles(outputs: Sequence[Output]) -> Iterator[str]:
    """Return the roles of the models that ran, the target first."""
    return iter(dict.fromkeys(["target", *(s.model for output in outputs for s in output.steps)]))


SpeedAccuracy = tuple[float, float]
"""Tokens per forward, and accuracy as a fraction."""


def pareto_front(points: Sequence[SpeedAccuracy]) -> list[int]:
    """Return the indices of points that no other point dominates."""

    def is_dominated(mine: SpeedAccuracy) -> bool:
        return any(p[0] >= mine[0] and p[1] >= mine[1] and p != mine for p in points)

    return [number for number, point in enumerate(points) if not is_dominated(point)]
