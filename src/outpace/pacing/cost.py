"""Seconds of passes as a function of their rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, log2

CostPoints = Mapping[int, tuple[float, float]]
"""Rows and seconds of passes, by the step of the rows (`step_of`)."""

LoadKey = tuple[int, int]
"""Rounded binary logarithm of the running requests, and the bucket of their mean context."""

StoredCosts = Mapping[LoadKey, Mapping[str, CostPoints]]
"""Costs by load and role, as ratios to the shortest pass of the target at that load."""

CONTEXT_LIMITS = 1024, 4096, 16384
"""Most tokens of a context in each bucket but the last: attention makes rows dearer."""

AVERAGED_PASSES, MINIMUM_PASSES = 64, 4
"""Passes of similar length that are averaged, and those whose minimum is used.

The first passes of a length are slower, by up to three times, and never faster.
"""

SINGLE_ROWS = 16
"""Rows up to which each number is measured separately: products may pad them, in steps."""

OUTLIER_FACTOR = 1.5
"""Multiple of the mean at which a pass is clipped: other work used the processor."""


def step_of(rows: float) -> int:
    """Return the step of a number of rows: itself, or half powers of two above `SINGLE_ROWS`."""
    if rows < SINGLE_ROWS:
        return max(round(rows), 1)
    return SINGLE_ROWS + round(2 * log2(rows / SINGLE_ROWS))


def step_rows(step: int) -> float:
    """Return the rows in the middle of a step."""
    return step if step <= SINGLE_ROWS else SINGLE_ROWS * 2 ** ((step - SINGLE_ROWS) / 2)


@dataclass(slots=True)
class PassCost:
    """Seconds of a pass by its rows: recent means at similar lengths, interpolated."""

    means: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    """Number of passes, their mean rows and seconds, by step."""
    prior: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Rows and seconds of passes at another load, or ratios of an earlier process, by step."""
    level: float = 1.0
    """Factor of the prior, by the passes measured at this load."""
    minima: dict[int, float] = field(default_factory=dict)
    """Least seconds of passes, by step: other programs only slow them down."""
    curve: tuple[Sequence[float], Sequence[float]] | None = None
    """See `rising_curve`; None after new passes."""

    def record_pass(self, rows: int, seconds: float) -> None:
        key, self.curve = step_of(rows), None
        count, length, mean = self.means.get(key, (0, 0.0, inf))
        if count < MINIMUM_PASSES:
            mean = min(mean, seconds)
        else:
            mean += (min(seconds, OUTLIER_FACTOR * mean) - mean) / (count + 1)
        length += (rows - length) / (count + 1)
        self.minima[key] = min(self.minima.get(key, inf), seconds)
        self.means[key] = min(count + 1, AVERAGED_PASSES), length, mean

    @property
    def is_cold(self) -> bool:
        """Whether no length was measured twice; a first pass includes warm-up."""
        return not self.prior and all(count == 1 for count, *_ in self.means.values())

    @property
    def curve_points(self) -> dict[int, tuple[float, float]]:
        """Rows and seconds of passes, by step."""
        # Priors are raised to at least the seconds of shorter passes at this load.
        measured = self.measured_points
        scaled = {
            key: (
                length,
                max([mean * self.level, *(m for k, (_, m) in measured.items() if k < key)]),
            )
            for key, (length, mean) in self.prior.items()
        }
        return scaled | measured

    @property
    def measured_points(self) -> dict[int, tuple[float, float]]:
        return {
            key: (length, mean)
            for key, (count, length, mean) in self.means.items()
            if count > 1 or self.is_cold
        }

    @property
    def least_points(self) -> dict[int, tuple[float, float]]:
        """Rows and least seconds of passes, by step."""
        return {
            key: (length, self.minima.get(key, mean))
            for key, (length, mean) in self.curve_points.items()
        }

    @property
    def prior_levels(self) -> list[float]:
        """Measured seconds over those of the prior, of each step that has both."""
        measured, prior = self.measured_points, self.prior
        return [measured[k][1] / prior[k][1] for k in measured.keys() & prior.keys() if prior[k][1]]

    def as_prior(self) -> PassCost:
        return PassCost(prior={} if self.is_cold else self.curve_points)

    def without_prior(self) -> PassCost:
        return PassCost(self.means, minima=self.minima)

    def set_level(self, level: float) -> None:
        """Set the factor of the prior."""
        if level != self.level:
            self.level, self.curve = level, None

    def reset_weight(self, rows: float) -> None:
        """Let the next passes of about this length count as much as all before."""
        key = step_of(rows)
        if key in self.means:
            count, length, mean = self.means[key]
            self.means[key] = min(count, MINIMUM_PASSES), length, mean

    def seconds_at(self, rows: float) -> float:
        """Return the expected seconds of a pass with this many rows."""
        # Below and above all measured lengths they are in proportion: requests that draft at
        # different times share their passes, so that none may have the rows of all.
        lengths, means = self.rising_curve()
        return interpolate(rows, lengths, means) * max(rows / lengths[-1], 1.0)

    def least_seconds_at(self, rows: float) -> float:
        """Return the least seconds of a pass: those measured for as many rows or fewer."""
        # Where no products pad their rows, the cost has no steps that interpolation could hide.
        if rows > SINGLE_ROWS:
            return self.seconds_at(rows)
        lengths, means = self.rising_curve()
        index = bisect_left(lengths, rows)
        is_measured = step_of(rows) in map(step_of, lengths[max(index - 1, 1) : index + 1])
        return self.seconds_at(rows) if is_measured else means[index - 1]

    def rising_curve(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return lengths and seconds, from 0 on; more rows never take less time."""
        if self.curve is None:
            lengths, means = zip(*sorted(self.curve_points.values()), strict=True)
            rising = [*accumulate(reversed(means), min)][::-1]
            self.curve = [0.0, *lengths], [0.0, *rising]
        return self.curve

    @property
    def seconds_per_row(self) -> float:
        """Seconds per row of the longest passes."""
        if not self.means:
            length, mean = max(self.prior.values())
            return self.level * mean / length
        _, length, mean = self.means[max(self.means)]
        return mean / length

    def covers(self, rows: float) -> bool:
        """Return whether this length, or both shorter and longer ones, were measured twice."""
        keys = [key for key, (count, *_) in self.means.items() if count > 1]
        return bool(keys) and min(keys) <= step_of(rows) <= max(keys)


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Interpolate linearly at `x`, constant beyond the last of the rising `xs`."""
    index = bisect_left(xs, x)
    if index == len(xs):
        return ys[-1]
    share = (x - xs[index - 1]) / (xs[index] - xs[index - 1])
    return ys[index - 1] + share * (ys[index] - ys[index - 1])
