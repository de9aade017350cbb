"""What passes take, by how many rows they are fed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import log2

MEMORY, FEW = 64, 3
"""Passes of about a length, and cycles of a method, that are remembered; and where in doubt."""


@dataclass(slots=True)
class Cost:
    """Seconds of a pass by its rows: means of recent ones of about a length, and between them.

    Attributes:
        means: how many are remembered, their mean rows and seconds, by half powers of two.
        prior: rows and seconds of passes under other circumstances, by half powers of two, beside
            which all take about as much more, or less, as those that were seen.
        cold: whether nothing has run, so that what runs first is slow for other reasons.
        curve: lengths and seconds that never fall, from 0 on; None where passes came since.
    """

    means: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    prior: dict[int, tuple[float, float]] = field(default_factory=dict)
    cold: bool = True
    curve: tuple[Sequence[float], Sequence[float]] | None = None

    def add(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        key, self.curve = round(2 * log2(rows)), None
        if self.cold and self.means:
            self.means, self.cold = {}, False
        count, length, mean = self.means.get(key, (0, 0.0, 0.0))
        if count:
            # Something else may have had the machine, in the first one as well.
            seconds = min(seconds, 2 * mean)
            mean = min(mean, seconds) if count == 1 else mean
        count = min(count + 1, MEMORY)
        self.means[key] = (
            count,
            length + (rows - length) / count,
            mean + (seconds - mean) / count,
        )

    @property
    def points(self) -> dict[int, tuple[float, float]]:
        """Rows and seconds of passes, by half powers of two.

        What was seen elsewhere is no less than what shorter passes took here.
        """
        here = {key: (length, mean) for key, (_, length, mean) in self.means.items()}
        more = [here[key][1] - self.prior[key][1] for key in here.keys() & self.prior.keys()]
        shift = sum(more) / max(len(more), 1)
        there = {
            key: (length, max(0.0, mean + shift, *(m for k, (_, m) in here.items() if k < key)))
            for key, (length, mean) in self.prior.items()
        }
        return there | here

    def elsewhere(self) -> Cost:
        """What to think at first of the same passes under other circumstances."""
        return Cost(prior=self.points, cold=self.cold)

    def renew(self, rows: float) -> None:
        """Let the passes of about so many rows that follow count as much as all that were."""
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
        """Seconds of one of many rows."""
        length, mean = (points := self.points)[max(points)]
        return mean / length

    def knows(self, rows: float) -> bool:
        """Whether passes of about so many rows, or of both fewer and more, were seen."""
        return bool(self.means) and min(self.means) <= round(2 * log2(rows)) <= max(self.means)


def interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """What lies at `x` between points with rising `xs`, of which the first is below it."""
    place = bisect_left(xs, x)
    if place == len(xs):
        return ys[-1]
    share = (x - xs[place - 1]) / (xs[place] - xs[place - 1])
    return ys[place - 1] + share * (ys[place] - ys[place - 1])
