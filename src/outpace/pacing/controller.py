"""How many tokens to propose at a time: as many as promise the most tokens per second."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, log2
from operator import mul
from sys import maxsize

from outpace.decoding.dial import Dial, Passes
from outpace.pacing.cost import MEMORY, Cost

HOPE, FAITH = 0.75, 3
"""Share of proposals that are thought to be kept at first, and how many that thought weighs."""

GAIN, STAY = 1.07, 1.02
"""Tokens per second over those of the least dial from which on another is worth it, and worth
keeping: where both are about as good, they shall not take turns by chance."""

TRIAL = 4
"""Cycles in a row, at least, by which one request tries another dial where the least seems best."""

NEAR, SHOWN = 1.25, 32
"""How many times as long per token as the best another dial may promise to take, and by how many
cycles it then shows what it is worth, or each of all requests so many that run at a time."""

CLOSE = 1.05
"""The same, so that a smaller dial is taken: where none tells of another, so much is chance."""

LONG = 256
"""Cycles that are remembered of each dial where none tells of another, and chance has its part."""

PATIENCE = 256
"""Cycles without news until the next trial, at first; then twice as many each time."""

REMINDER, SELDOM = 16, 512
"""Cycles of another dial until some with the least are timed again; each time twice as many."""

REVIEW, LONGEST = 8, 64
"""Cycles for which a decision holds, and one for the least dial that was made again and again."""

WARM = 4
"""Cycles with the least in a row until they take what they take in the long run."""

Debt = tuple[int, int, int]
"""Slots that a draft has still to read, tokens that are left, slots to be fed again for it."""

NOTHING: Debt = 0, 0, 0
"""What nobody owes."""


@dataclass(slots=True)
class Load:
    """What is decided while about so many requests run at a time.

    Attributes:
        dial: tokens that a cycle is to propose, and `rival` another number that promises most.
        tried: dials that were chosen since the last reminder, if only to be tried.
        costs: what passes of each model take.
        gain: seconds per token of a request that this saves beside the least dial, but for those
            that are no reason for it.
        stay: the same for one request while all others propose anyway, and it waits for them.
        price, again: seconds for each slot that a draft has still to read before it drafts, and
            that the target has to be fed again for it.
        review, reminder: cycles from which on this is decided anew, and timed with the least; no
            reminder where the least is best.
        spell, pause: cycles for which a decision holds, and until the next reminder.
        patience, trial: cycles without news until the next trial, and those that it has.
    """

    dial: int = 0
    rival: int = 0
    tried: set[int] = field(default_factory=set)
    costs: dict[str, Cost] = field(default_factory=dict)
    gain: float = inf
    stay: float = inf
    price: float = 0.0
    again: float = 0.0
    review: int = 0
    reminder: int = 0
    spell: int = REVIEW
    pause: int = REMINDER
    patience: int = PATIENCE
    trial: int = TRIAL

    def pays(self, gain: float, debt: Debt) -> bool:
        """Whether a gain on each token that is left is more than it takes to catch up."""
        behind, left, lost = debt
        return left * gain >= behind * self.price + lost * self.again


class PaceController:
    """Turns the dial of one method for all of its requests, by what they have seen of late.

    The engine tells it how many requests run and what every pass took, a request what every cycle
    brought. Costs and decisions are kept apart for loads that differ by a factor of 2; one that was
    never met begins with what passes took at the load next to it.

    A cycle takes as long as its slowest request, so all propose or none does: whether it pays to
    catch up is asked for all together.
    """

    def __init__(self, dial: Dial) -> None:
        self.dial = dial
        least = dial.values[0]
        rows = [rows for model, rows, _ in dial.passes(least, least) if model == "target"]
        self.fewest = max(rows)
        """Most rows of the target for each request, with the least."""
        self.memory = MEMORY if dial.nested else LONG
        self.load = Load()
        self.loads, self.requests = {0: self.load}, 1
        self.cycles = 0
        self.told, self.tellers = NOTHING, 0
        """What requests have said that they owe, and how many, until all that run have."""
        self.crowd: Debt | None = None
        """The sum of the last time that all had."""
        self.heard = 0
        """The last cycle in which one said it."""
        self.rest = 0
        """The cycle until which a request that proposed nothing need not ask again."""
        self.plain = 0
        """Passes of the target with the least in a row."""
        self.rates: dict[int, list[float]] = {}
        self.counts: dict[int, list[int]] = {}
        self.news = 0
        """The last cycle that proposed more than the least."""
        self.trier: object = None
        """The request that tries another dial, until cycle `tried`."""
        self.tried = 0

    def run(self, requests: int) -> None:
        """So many requests run from now on."""
        if requests == self.requests:
            return
        self.requests, key = requests, round(log2(requests))
        if key not in self.loads:
            near = min(self.loads, key=lambda other: abs(other - key))
            costs = self.loads[near].costs
            self.loads[key] = Load(costs={model: cost.elsewhere() for model, cost in costs.items()})
        if self.load is not self.loads[key]:
            self.load, self.rest = self.loads[key], 0

    def passed(self, model: str, rows: int, seconds: float) -> None:
        """A pass of a model was fed so many rows.

        The first ones without a draft behind others are slower than those that follow: they count
        only where none is known.
        """
        costs = self.load.costs
        if model not in costs:
            costs[model] = Cost()
        plain = model == "target" and rows <= self.requests * self.fewest
        if self.plain >= WARM or not plain or not costs[model].knows(rows):
            costs[model].add(rows, seconds)
        if model == "target":
            self.plain = self.plain + 1 if plain else 0
            self.cycles += 1

    def brought(self, value: int, tokens: int) -> None:
        """A cycle that proposed so many tokens brought so many."""
        if value > self.dial.values[0]:
            self.news = self.cycles
        elif self.dial.nested and value == 1:
            return  # where but one is proposed, it is the target's own
        key = 0 if self.dial.nested else value
        if key not in self.rates:
            self.rates[key] = self.longer(value)[:value]
            self.counts[key] = [FAITH] * len(self.rates[key])
        rates, counts = self.rates[key], self.counts[key]
        for index in range(min(tokens + 1, value)):
            if index == len(rates):
                rates.append(HOPE if index == 1 else rates[-1])
                counts.append(FAITH)
            counts[index] = min(counts[index] + 1, self.memory)
            rates[index] += ((index < tokens) - rates[index]) / counts[index]

    def hear(self, debt: Debt) -> Debt:
        """What a request owes, who says it; what all together owed when they last said it."""
        if self.cycles > self.heard + 1:
            self.told, self.tellers, self.crowd = NOTHING, 0, None
        self.heard = self.cycles
        (behind, left, lost), told = debt, self.told
        self.told = told[0] + behind, told[1] + left, told[2] + lost
        self.tellers += 1
        if self.tellers >= self.requests:
            self.told, self.tellers, self.crowd = NOTHING, 0, self.told
        return self.crowd or self.told

    def settled(self, behind: int, left: int) -> bool:
        """Whether a request is to propose nothing for a while.

        The least was best again and again, and no trial is due; or what its draft has still to read
        does not pay, and will less and less.
        """
        load = self.load
        self.hear(debt := (behind, left, 0))
        if load.dial != self.dial.values[0]:
            return not load.pays(load.gain, debt)
        return load.spell == LONGEST and self.cycles < self.news + load.patience

    def value(
        self, request: object = None, behind: int = 0, left: int = maxsize, lost: int = 0
    ) -> int:
        """Number of tokens that the next cycle of a request is to propose.

        The draft has `behind` slots still to read, and the target is to be fed `lost` of them again
        for it. That has to pay over the `left` tokens: for all together, and for this one where the
        others do not wait.
        """
        load, least = self.load, self.dial.values[0]
        if self.cycles >= load.review:
            load.review = self.cycles + self.decide(load)
        crowd = self.hear(debt := (behind, left, lost))
        if load.dial == least:
            if self.tries(request, load):
                self.rest = 0
                return load.rival
            if load.spell == LONGEST:
                self.rest = min(load.review, self.news + load.patience)
            return least
        if not load.pays(load.gain, crowd):
            self.rest = load.review = max(load.review, self.cycles + REVIEW)
            return least
        self.rest = 0
        return load.dial if load.pays(load.stay, debt) else least

    def tries(self, request: object, load: Load) -> bool:
        """Whether a request is the one that tries another dial for all."""
        if self.cycles < self.tried:
            return request is self.trier
        if load.rival == load.dial or self.cycles < self.news + load.patience:
            return False
        self.trier, self.tried, self.news = request, self.cycles + load.trial, self.cycles
        load.review = self.tried
        load.patience *= 2
        for counts in self.counts.values():
            counts[:] = [min(count, FAITH) for count in counts]  # what it shows counts for most
        return True

    def decide(self, load: Load) -> int:
        """Choose what promises most at a load; for how many cycles that holds."""
        (least, *others), before = self.dial.values, load.dial
        load.dial = load.rival = self.dial.values[-1]
        passes = self.passes(load.dial)
        warm = {model for model, cost in load.costs.items() if not cost.cold}
        if not {model for model, _, times in passes if times} <= warm:
            return 1
        times = {
            value: self.seconds(value) / max(self.tokens(value), 1e-9) for value in self.dial.values
        }
        load.rival = best = min(others, key=times.__getitem__, default=least)
        if not self.dial.nested and others:
            load.rival = next(value for value in others if times[value] <= CLOSE * times[best])
        due = 0 < load.reminder <= self.cycles
        worth = STAY if load.reminder else GAIN
        if times[load.rival] * worth > times[least]:
            load.dial, load.reminder = least, 0
            near = times[load.rival] < NEAR * times[least]
            load.trial = max(TRIAL, SHOWN // self.requests) if near else TRIAL
        elif due and self.plain < 2 * WARM and self.cycles < load.reminder + LONGEST:
            if before != least:
                load.costs["target"].renew(self.fewest * self.requests)
            load.dial = least
            return 2 * WARM - self.plain
        else:
            if due:
                load.pause, load.tried = min(2 * load.pause, SELDOM), set()
            if due or not load.reminder:
                load.reminder = self.cycles + load.pause
            load.dial, load.patience = load.rival, PATIENCE
            rivals = {value for value in others if times[value] < NEAR * times[load.rival]}
            load.tried.add(load.rival)
            if untried := not self.dial.nested and rivals - load.tried:
                load.dial = min(untried, key=times.__getitem__)
                load.tried.add(load.dial)
            load.gain = times[least] - worth * times[load.dial]
            load.stay = self.seconds(load.dial) - times[load.dial]
            drafts = {model for model, *_ in passes} - {"target"}
            load.price = self.requests * sum(load.costs[model].row for model in drafts)
            load.again = self.requests * load.costs["target"].row
            if untried:
                return max(REVIEW, SHOWN // self.requests)
        same = load.dial == before == least
        load.spell = min(2 * load.spell, LONGEST) if same else REVIEW
        return load.spell if self.known(load.dial) else 1

    def known(self, value: int) -> bool:
        """Whether passes as in a cycle that proposes so many were seen."""
        costs = self.load.costs
        return all(
            costs[model].knows(rows * self.requests)
            for model, rows, times in self.passes(value)
            if times
        )

    def seconds(self, value: int) -> float:
        """What the passes of a cycle take that proposes so many."""
        return sum(
            times * self.load.costs[model].at(rows * self.requests)
            for model, rows, times in self.passes(value)
            if times
        )

    def passes(self, value: int) -> Passes:
        """What cycles that propose so many run."""
        return self.dial.passes(value, self.tokens(value))

    def tokens(self, value: int) -> float:
        """Tokens that cycles which propose so many bring on average; at first as longer ones do."""
        rates = self.longer(value)
        last = rates[-1] if len(rates) > 1 else HOPE
        total: float = sum(accumulate((rates + [last] * value)[:value], mul))
        return total

    def longer(self, value: int) -> list[float]:
        """How often each token was kept by cycles that propose as many, or else by longer ones."""
        tried = min(self.rates, key=lambda other: (other < value, abs(other - value)), default=0)
        return self.rates.get(tried, [1.0])
