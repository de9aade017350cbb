"""How many tokens to propose at a time: as many as promise the most tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import log2
from operator import mul

from outpace.decoding.cost import MEMORY, Cost

HOPE, FAITH = 0.75, 3
"""Share of proposals that are thought to be kept at first, and how many that thought weighs."""

TRIAL = 4
"""Cycles in a row by which another dial is tried where the least one seems best."""

PATIENCE = 32
"""Cycles until the next trial, at first; then twice as many each time."""

REMINDER = 256
"""Cycles until one with the least dial is timed again."""

REVIEW = 8
"""Cycles for which a decision holds."""

LONG = 64
"""Rows of a request from which on a pass reads a prompt, unless a cycle has half as many."""

MOST = 64
"""Most tokens that are proposed where a pace decides."""

Passes = Sequence[tuple[str, int, int]]
"""What a cycle runs: the role of a model, rows of each request, how often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """What a method lets a `Pace` decide: how many tokens a cycle proposes.

    Attributes:
        values: numbers to choose from, rising, from the least parallel to what the options say.
        passes: the passes of a cycle that proposes so many.
        nested: whether a cycle that proposes more keeps what a shorter one would have kept, so
            that each tells of all that are shorter.
    """

    values: Sequence[int]
    passes: Callable[[int], Passes]
    nested: bool = True


def halved(least: int, most: int) -> list[int]:
    """Numbers from `least` to `most`, each half of the next; none far above `MOST`."""
    values = [most := max(least, min(most, MOST))]
    while values[0] // 2 > least:
        values.insert(0, values[0] // 2)
    return values if least >= most else [least, *values]


@dataclass(slots=True)
class Load:
    """What is known, and decided, while about so many requests run at a time."""

    costs: dict[str, Cost] = field(default_factory=dict)
    tried: set[int] = field(default_factory=set)
    dial: int = 0
    review: int = 0
    reminder: int = 0
    due: int = 0
    patience: int = PATIENCE

    def seconds(self, passes: Passes) -> float:
        """What the passes of a cycle take."""
        one = self.costs["plain"].at(1) if "plain" in self.costs else None
        taken = 0.0
        for model, rows, times in passes:
            plain = one if model == "target" else None
            if plain is None or rows > 1:
                taken += times * self.costs[model].at(rows, plain)
            else:
                taken += times * plain
        return taken


class Pace:
    """Turns the dial of one method for all of its requests, by what they have seen of late.

    The engine tells it of every pass, a request of what every cycle brought. Costs are those of
    passes in which all requests feed the same number of rows. They are kept apart for numbers of
    requests that differ by a factor of 2, since what pays depends on how busy the machine is.
    """

    def __init__(self, dial: Dial) -> None:
        self.dial = dial
        self.loads: dict[int, Load] = {}
        self.load = self.loads.setdefault(0, Load())
        self.long = max(LONG, *(2 * rows for _, rows, _ in dial.passes(dial.values[-1])))
        self.cycles = 0
        self.rates: dict[int, list[float]] = {}
        self.counts: dict[int, list[int]] = {}

    def passed(self, model: str, requests: int, rows: int, seconds: float) -> None:
        """A pass of a model was fed so many rows of so many requests."""
        each = round(rows / requests)
        if model == "target":
            self.load = self.loads.setdefault(round(log2(requests)), Load())
            self.cycles += 1
        if each < self.long:
            # A row alone is another kind of product.
            kind = "plain" if (model, each) == ("target", 1) else model
            self.load.costs.setdefault(kind, Cost()).add(each, seconds)

    def brought(self, value: int, tokens: int) -> None:
        """A cycle that proposed so many tokens brought so many."""
        key = 0 if self.dial.nested else value
        # Where but one is proposed, it is the target's own.
        rates, counts = self.rates.setdefault(key, [1.0]), self.counts.setdefault(key, [FAITH])
        for index in range(min(tokens + 1, value)):
            if index == len(rates):
                rates.append(HOPE if index == 1 else rates[-1])
                counts.append(FAITH)
            counts[index] = min(counts[index] + 1, MEMORY)
            rates[index] += ((index < tokens) - rates[index]) / counts[index]

    def value(self) -> int:
        """Number of tokens that a cycle is to propose now."""
        if self.cycles >= self.load.review:
            self.load.dial, cycles = self.decide(self.load)
            self.load.review = self.cycles + cycles
            self.load.tried.add(self.load.dial)
        return self.load.dial

    def decide(self, load: Load) -> tuple[int, int]:
        """A value of the dial, and for how many cycles."""
        values = self.dial.values
        models = {model for model, _, times in self.dial.passes(values[-1]) if times}
        if not models <= load.costs.keys():
            return values[-1], 1
        if values[0] not in load.tried or self.cycles >= load.reminder:
            load.reminder = self.cycles + REMINDER
            return values[0], 1 if self.dial.nested else TRIAL
        speeds = {
            value: self.tokens(value) / max(load.seconds(self.dial.passes(value)), 1e-9)
            for value in values
        }
        best = max(speeds, key=speeds.__getitem__)
        if best != values[0]:
            load.patience, load.due = PATIENCE, 0
        elif self.cycles >= load.due and len(values) > 1:
            load.due, load.patience = self.cycles + TRIAL + load.patience, 2 * load.patience
            for counts in self.counts.values():
                counts[:] = [min(count, FAITH) for count in counts]  # what it shows counts for most
            return max(values[1:], key=speeds.__getitem__), TRIAL
        return best, REVIEW

    def tokens(self, value: int) -> float:
        """Tokens that cycles which propose so many bring on average."""
        rates = self.rates.get(0 if self.dial.nested else value, [1.0])
        last = rates[-1] if len(rates) > 1 else HOPE
        total: float = sum(accumulate((rates + [last] * value)[:value], mul))
        return total
