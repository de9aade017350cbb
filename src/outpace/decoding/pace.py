"""How many tokens to draft at a time: as many as promise the most tokens per second."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

HOPE, FAITH = 0.75, 3
"""Share of drafts that are thought to be kept at first, and how many drafts that thought weighs."""

MEMORY = 64
"""Verifications, and passes, that are remembered."""

TRIAL = 4
"""Verifications in a row by which drafting is tried where it does not seem to pay."""

PATIENCE = 32
"""Passes without drafts until a trial, at first; then twice as many each time."""

REMINDER = 256
"""Passes until one without drafts is timed again."""

LONG = 64
"""Rows of a request from which on a pass is no verification but reads a prompt."""


@dataclass(slots=True)
class Cost:
    """Seconds of a pass by its rows: a line through recent ones, by least squares."""

    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(5))

    def add(self, rows: int, seconds: float) -> None:
        """A pass fed so many rows per request."""
        if self.sums[0] > 2:
            # Something else may have had the machine.
            seconds = min(seconds, 2 * self.at(rows))
        self.sums *= 1 - 1 / MEMORY
        self.sums += moments(rows, seconds)

    def at(self, rows: float, plain: float | None = None) -> float:
        """Seconds that a pass of so many rows per request takes; more rows never take less.

        `plain` is what one row takes, which counts as one more pass.
        """
        sums = self.sums if plain is None else self.sums + moments(1, plain)
        count, x, y, xx, xy = sums.tolist()
        spread = xx - x * x / count
        slope = max((xy - x * y / count) / spread, 0.0) if spread > 1e-6 * xx else 0.0
        return max(y / count + slope * (rows - x / count), 0.0)


def moments(rows: int, seconds: float) -> NDArray[np.float64]:
    """What least squares need of a point."""
    return np.array((1, rows, seconds, rows * rows, rows * seconds))


class Pace:
    """What the requests of one method have seen of late: seconds of passes, drafts kept.

    The engine tells it of every pass, the method of every verification. Costs are those of passes
    in which all requests feed the same number of rows; they are kept apart for batches of one, of
    two or three, of four to seven, and so on.
    """

    def __init__(self) -> None:
        self.costs: dict[tuple[str, int], Cost] = {}
        self.size = 0
        self.passes = 0
        self.due, self.patience, self.trial = 0, PATIENCE, TRIAL
        self.rates: list[float] = []
        self.counts: list[int] = []

    def passed(self, model: str, requests: int, rows: int, seconds: float) -> None:
        """A pass of a model was fed so many rows of so many requests."""
        self.size = requests.bit_length()
        self.passes += model == "target"
        each = round(rows / requests)
        if each < LONG:
            # A row alone is another kind of product.
            kind = "plain" if (model, each) == ("target", 1) else model
            self.costs.setdefault((kind, self.size), Cost()).add(each, seconds)

    def verified(self, drafted: int, kept: int) -> None:
        """A verification kept so many drafts."""
        for index in range(min(kept + 1, drafted)):
            if index == len(self.rates):
                self.rates.append(self.rates[-1] if self.rates else HOPE)
                self.counts.append(FAITH)
            self.counts[index] = min(self.counts[index] + 1, MEMORY)
            self.rates[index] += ((index < kept) - self.rates[index]) / self.counts[index]

    def length(self, most: int, *, rows: int, once: bool) -> int:
        """Number of tokens to draft, 0 to `most`.

        The draft is fed `rows` rows per pass, and takes one pass for all tokens or, unless `once`,
        one for each. Before anything has been timed, it is `most`.
        """
        plain, target, draft = (
            self.costs.get((kind, self.size)) for kind in ("plain", "target", "draft")
        )
        if target is None or draft is None or not most:
            return most
        if plain is None or self.passes % REMINDER == 0:
            return 0
        alone, drafting = plain.at(1), draft.at(rows)
        speeds = [
            tokens / (max(target.at(count + 1, alone), alone) + drafting * (1 if once else count))
            for count, tokens in enumerate(self.tokens(most), 1)
        ]
        best = 1 + int(np.argmax(speeds))
        if speeds[best - 1] * alone > 1:
            self.patience, self.trial = PATIENCE, TRIAL
            return best
        if self.trial:
            self.trial -= 1
            self.due = self.passes + self.patience
            return best
        if self.passes >= self.due:
            self.patience *= 2
            self.trial = TRIAL
        return 0

    def tokens(self, most: int) -> list[float]:
        """Tokens that verifications of 1 to `most` drafts bring on average."""
        last = self.rates[-1] if self.rates else HOPE
        rates = [*self.rates, *[last] * most][:most]
        return list(accumulate(accumulate(rates, mul), initial=1.0))[1:]
