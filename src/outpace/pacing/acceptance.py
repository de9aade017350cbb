"""Estimate how many tokens a cycle of each draft length commits."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

PRIOR, PRIOR_WEIGHT = 0.75, 3
"""Acceptance rate assumed for a place that was not drafted yet, and the cycles this counts as.

Published drafts are accepted at 0.6 to 0.9; three cycles outweigh a prior that is wrong."""

MEMORY = 64
"""Cycles over which a rate is averaged: it is then known to within 0.06."""


class Acceptance:
    """Acceptance rate of each place of a draft, given that all places before it were accepted.

    With `nested` draft lengths one list of rates serves all of them, since a longer draft begins
    with the shorter one. Otherwise each draft length has a list of its own, which starts as a copy
    of the nearest longer one.
    """

    def __init__(self, *, nested: bool) -> None:
        self.nested = nested
        self.rates: dict[int, list[float]] = {}
        self.counts: dict[int, list[int]] = {}

    def add(self, value: int, tokens: int) -> None:
        """Record a cycle that proposed `value` tokens and committed `tokens`."""
        if self.nested and value == 1:
            return  # the only token is the target's own
        key = 0 if self.nested else value
        if key not in self.rates:
            self.rates[key] = self.nearest(value)[:value]
            self.counts[key] = [PRIOR_WEIGHT] * len(self.rates[key])
        rates, counts = self.rates[key], self.counts[key]
        for place in range(min(tokens + 1, value)):
            if place == len(rates):
                rates.append(PRIOR if place == 1 else rates[-1])
                counts.append(PRIOR_WEIGHT)
            counts[place] = min(counts[place] + 1, MEMORY)
            rates[place] += ((place < tokens) - rates[place]) / counts[place]

    def tokens(self, value: int) -> float:
        """Mean tokens of a cycle; places never drafted are accepted like the last one that was."""
        rates = self.nearest(value)
        last = rates[-1] if len(rates) > 1 else PRIOR
        total: float = sum(accumulate((rates + [last] * value)[:value], mul))
        return total

    def nearest(self, value: int) -> list[float]:
        """Rates of this draft length, of the nearest longer one, or of the nearest shorter one."""
        nearest = min(
            self.rates, key=lambda other: (other < value, abs(other - value)), default=None
        )
        return [1.0] if nearest is None else self.rates[nearest]

    def renew(self) -> None:
        """Give all estimates the weight of the prior, so that the next cycles count most."""
        for counts in self.counts.values():
            counts[:] = [min(count, PRIOR_WEIGHT) for count in counts]
