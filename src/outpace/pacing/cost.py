"""What passes take, by how many rows they are fed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, log2

MEMORY, FEW = 64, 4
"""Passes of about one length over which a mean is taken, and those of which the least counts.

The first passes of a length are slower, by up to three times, and never quicker."""

CLIP = 1.5
"""Factor of the mean up to which a pass counts: beyond, something else had the processor."""


@dataclass(slots=True)
class Cost:
    """Seconds of a pass by its rows: means of recent ones of about a length, and between them.

    Attributes:
        means: number of passes, their mean rows and seconds, by half powers of two.
        prior: rows and seconds of passes at another load, by half powers of two. All take as much
            more, or less, at this one as those that were measured here.
        curve: lengths and seconds that never fall, from 0 on; None where passes came since.
    """

    means: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    prior: dict[int, tuple[float, float]] = field(default_factory=dict)
    curve: tuple[Sequence[float], Sequence[float]] | None = None

    def add(self, rows: int, seconds: float) -> None:
        """Record the time of a pass."""
        key, self.curve = round(2 * log2(rows)), None
        count, length, mean = self.means.get(key, (0, 0.0, inf))
        if count < FEW:
            mean = min(mean, seconds)
        else:
            mean += (min(seconds, CLIP * mean) - mean) / (count + 1)
        length += (rows - length) / (count + 1)
        self.means[key] = min(count + 1, MEMORY), length, mean

    @property
    def cold(self) -> bool:
        """Whether no length was measured twice; what runs once is slow for other reasons."""
        return not self.prior and all(count == 1 for count, *_ in self.means.values())

    @property
    def points(self) -> dict[int, tuple[float, float]]:
        """Rows and seconds of passes, by half powers of two.

        What was seen elsewhere is no less than what shorter passes took here.
        """
        here = {
            key: (length, mean)
            for key, (count, length, mean) in self.means.items()
            if count > 1 or self.cold
        }
        more = [here[key][1] - self.prior[key][1] for key in here.keys() & self.prior.keys()]
        shift = sum(more) / max(len(more), 1)
        there = {
            key: (length, max(0.0, mean + shift, *(m for k, (_, m) in here.items() if k < key)))
            for key, (length, mean) in self.prior.items()
        }
        return there | here

    def elsewhere(self) -> Cost:
        """What to think at first of the same passes under other circumstances."""
        return Cost(prior={} if self.cold else self.points)

    def renew(self, rows: float) -> None:
        """Let the next passes of about this length count as much as all before."""
        key = round(2 * log2(rows))
        if key in self.means:
            count, length, mean = self.means[key]
            self.means[key] = min(count, FEW), length, mean

    def at(self, rows: float) -> float:
        """Seconds that a pass of so many rows takes, at best where no such pass was seen.

        That is in proportion below all that were, and no more than the longest above them.
        """
        if self.curve is None:
            lengths, means = zip(*sorted(self.points.values()), strict=True)
            rising = [*accumulate(reversed(means), min)][::-1]  # more rows never take less
            self.curve = [0.0, *lengths], [0.0, *rising]
        return interpolated(rows, *self.curve)

    @property
    def row(self) -> float:
        """Seconds per row of the longest passes."""
        points = {key: (length, mean) for key, (_, length, mean) in self.means.items()}
        length, mean = max((points or self.prior).values())
        return mean / length

    def knows(self, rows: float) -> bool:
        """Whether passes of this length, or of both fewer and more rows, were measured twice."""
        keys = [key for key, (count, *_) in self.means.items() if count > 1]
        return bool(keys) and min(keys) <= round(2 * log2(rows)) <= max(keys)


def interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """What lies at `x` between points with rising `xs`, of which the first is below it."""
    place = bisect_left(xs, x)
    if place == len(xs):
        return ys[-1]
    share = (x - xs[place - 1]) / (xs[place] - xs[place - 1])
    return ys[place - 1] + share * (ys[place] - ys[place - 1])
