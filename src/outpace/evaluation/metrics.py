"""Figures of a run, from the traces of its answers alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from outpace.api.output import Output

NORMAL = 1.959964
"""Standard deviations of 95 % of a normal law."""


def wilson(right: int, count: int) -> tuple[float, float]:
    """Interval of 95 % of a share (Wilson, 1927); from 0 to 1 where nothing was counted."""
    if count == 0:
        return 0.0, 1.0
    share, square = right / count, NORMAL**2 / count
    middle = (share + square / 2) / (1 + square)
    half = NORMAL * math.sqrt(share * (1 - share) / count + square / 4 / count) / (1 + square)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def ratio_error(above: Sequence[float], below: Sequence[float]) -> float:
    """Standard error of a ratio of sums over independent samples, by linearisation.

    With fewer than two samples there is none, and it is no number.
    """
    count, total = len(above), sum(below)
    if count < 2 or not total:
        return math.nan
    ratio = sum(above) / total
    squares = sum((a - ratio * b) ** 2 for a, b in zip(above, below, strict=True))
    return math.sqrt(count / (count - 1) * squares) / total


def groups(output: Output) -> list[int]:
    """Tokens that were committed from each forward of the target to its next.

    A first forward that was fed no hole is a prefill and does not count.
    """
    lengths: list[int] = []
    target = [step for step in output.steps if step.model == "target"]
    for step in output.steps:
        if step.model == "target":
            lengths.append(0)
        if lengths:
            lengths[-1] += step.kept
    return lengths if target and target[0].holes else lengths[1:]


def acceptance_length(outputs: Sequence[Output]) -> float:
    """Mean over the answers of the mean tokens kept of a forward of the target (as DFlash)."""
    means = [sum(lengths) / len(lengths) for lengths in map(groups, outputs) if lengths]
    return sum(means) / len(means) if means else 0.0


def histogram(outputs: Sequence[Output]) -> list[int]:
    """How many forwards of the target kept 0, 1, 2 … tokens."""
    counts = Counter(length for output in outputs for length in groups(output))
    return [counts[length] for length in range(max(counts, default=-1) + 1)]


def by_position(counts: Sequence[int]) -> list[float]:
    """Share of the forwards of a histogram that kept at least 1, 2 … tokens."""
    total = sum(counts)
    return [kept / total for kept in accumulate(reversed(counts[1:]))][::-1] if total else []


def rows_fed(output: Output, model: str = "target") -> int:
    """Rows that a model was fed after the prompt."""
    rows = sum(step.rows for step in output.steps if step.model == model)
    return max(rows - output.prompt_tokens, 0)


def p_cache(outputs: Sequence[Output]) -> float | None:
    """Tokens over rows fed to the target after the prompt (WeDLM, equation 4); None without any."""
    rows = sum(map(rows_fed, outputs))
    return sum(len(output.ids) for output in outputs) / rows if rows else None


def wasted(outputs: Sequence[Output]) -> int:
    """Rows fed to the target beyond the prompt and one for each token."""
    return sum(max(rows_fed(output) - len(output.ids), 0) for output in outputs)


def first_text(output: Output) -> float:
    """Seconds of the passes up to the first that committed a token, and with it."""
    seconds = 0.0
    for step in output.steps:
        seconds += step.seconds
        if step.kept:
            break
    return seconds


def percentile(values: Sequence[float], share: float) -> float:
    """Value below which so much of the values lies; 0 without any."""
    return float(np.quantile(values, share)) if len(values) else 0.0


def models(outputs: Sequence[Output]) -> Iterator[str]:
    """Roles of the models that ran, the target first."""
    return iter(dict.fromkeys(["target", *(s.model for output in outputs for s in output.steps)]))


Point = tuple[float, float]
"""Tokens per forward, and accuracy as a share."""

STEEP, DEEPEST = 3.0, 0.05


def aup(points: Sequence[Point], best: float) -> float:
    """Accuracy under parallelism: weighted area under accuracy against tokens per forward.

    As d3LLM's authors define it: points that lie more than 5 points of accuracy below the slowest
    do not count, and what lies below `best`, the best accuracy on the task, counts less. Raises
    `ValueError` without points.
    """
    if not points:
        raise ValueError("there is no point to take the area under")
    ordered = sorted(points)
    kept = [(speed, share) for speed, share in ordered if share >= ordered[0][1] - DEEPEST]

    def height(share: float) -> float:
        weight = min(math.exp(-STEEP * (1 - share / best)), 1.0) if best else 0.0
        return 100 * share * weight

    area = kept[0][0] * 100 * kept[0][1]
    for (before, low), (after, high) in zip(kept, kept[1:], strict=False):
        area += (after - before) * (height(low) + height(high)) / 2
    return area


def front(points: Sequence[Point]) -> list[int]:
    """Which points no other beats: none is as fast and as right, and better in one of both."""

    def beaten(mine: Point) -> bool:
        return any(p[0] >= mine[0] and p[1] >= mine[1] and p != mine for p in points)

    return [number for number, point in enumerate(points) if not beaten(point)]
