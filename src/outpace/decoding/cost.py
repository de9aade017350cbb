"""What passes take, by how many rows they are fed."""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 64
"""Passes, and cycles of a method, that are remembered."""


@dataclass(slots=True)
class Cost:
    """Seconds of a pass by its rows: a line through recent ones, by least squares."""

    sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, rows: int, seconds: float) -> None:
        """A pass fed so many rows per request."""
        if self.sums[0] > 2:
            # Something else may have had the machine.
            seconds = min(seconds, 2 * self.at(rows))
        self.sums = [
            old * (1 - 1 / MEMORY) + new
            for old, new in zip(self.sums, moments(rows, seconds), strict=True)
        ]

    def at(self, rows: float, plain: float | None = None) -> float:
        """Seconds that a pass of so many rows per request takes; more rows never take less.

        `plain` is what one row takes, which counts as one more pass.
        """
        sums = self.sums
        if plain is not None:
            sums = [a + b for a, b in zip(sums, moments(1, plain), strict=True)]
        count, x, y, xx, xy = sums
        spread = xx - x * x / count
        slope = max((xy - x * y / count) / spread, 0.0) if spread > 1e-6 * xx else 0.0
        return max(y / count + slope * (rows - x / count), plain or 0.0)


def moments(rows: float, seconds: float) -> tuple[float, ...]:
    """What least squares need of a point."""
    return 1.0, rows, seconds, rows * rows, rows * seconds
