"""Estimates of how many tokens a cycle of each draft length commits."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

PRIOR, PRIOR_WEIGHT = 0.75, 3
"""Acceptance rate assumed for a position that was not drafted yet, and its weight in cycles.

Published drafts are accepted at 0.6 to 0.9; three cycles outweigh a wrong prior.
"""

AVERAGED_CYCLES = 64
"""Cycles over which a rate is averaged: its standard error is then 0.06."""


class Acceptance:
    """Acceptance rate of each position of a draft, given that all before it were accepted.

    With `nested` draft lengths one list of rates serves all of them, since a longer draft begins
    with the shorter one. Otherwise each draft length has a separate list, which starts as a copy of
    the nearest longer one.
    """

    def __init__(self, *, nested: bool) -> None:
        self.nested = nested
        self.rates: dict[int, list[float]] = {}
        self.counts: dict[int, list[int]] = {}

    def record_cycle(self, value: int, tokens: int) -> None:
        """Record a cycle that proposed `value` tokens and committed `tokens`."""
        if self.nested and value == 1:
            return  # the only token is the target's own
        key = 0 if self.nested else value
        if key not in self.rates:
            self.rates[key] = self.nearest_rates(value)[:value]
            self.counts[key] = [PRIOR_WEIGHT] * len(self.rates[key])
        rates, counts = self.rates[key], self.counts[key]
        for position in range(min(tokens + 1, value)):
            if position == len(rates):
                rates.append(PRIOR if position == 1 else rates[-1])
                counts.append(PRIOR_WEIGHT)
            counts[position] = min(counts[position] + 1, AVERAGED_CYCLES)
            rates[position] += ((position < tokens) - rates[position]) / counts[position]

    def expected_tokens(self, value: int) -> float:
        """Return the mean tokens of a cycle; unmeasured positions use the last measured rate."""
        rates = self.nearest_rates(value)
        last = rates[-1] if len(rates) > 1 else PRIOR
        total: float = sum(accumulate((rates + [last] * value)[:value], mul))
        return total

    def nearest_rates(self, value: int) -> list[float]:
        """Return the rates of this draft length, the nearest longer or the nearest shorter one."""
        nearest = min(
            self.rates, key=lambda other: (other < value, abs(other - value)), default=None
        )
        return [1.0] if nearest is None else self.rates[nearest]

    def reset_weights(self) -> None:
        """Give all estimates the weight of the prior, so that the next cycles count most."""
        for counts in self.counts.values():
            counts[:] = [min(count, PRIOR_WEIGHT) for count in counts]
