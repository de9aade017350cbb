"""Choose how many tokens a cycle proposes: the number that promises the most tokens per second.

Expected tokens come from acceptance rates, expected seconds from the passes that were measured.
Their ratio decides. What is not running cannot be measured, so now and then it is tried.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2
from sys import maxsize

from outpace.decoding.dial import Dial, Passes
from outpace.pacing.acceptance import Acceptance
from outpace.pacing.backlog import Backlog, BacklogSum
from outpace.pacing.cost import Cost

MARGIN = 1.05
"""Factor by which drafting has to promise more tokens per second than plain decoding to begin.

It goes on until it promises less. Equal passes differ by about 5 %, and whoever begins to draft
first reads the text that the draft has missed."""

REVIEW = 8
"""Cycles between decisions while drafting: estimates move little in fewer."""

WARM, TRIAL = 4, 8
"""Cycles until passes are as fast as in the long run, and cycles of a trial.

Plain cycles after others are slower by up to a half, since the processor's caches still hold the
draft: only the second half of their trial is measured."""

PATIENCE, LONGEST = 64, 1024
"""Cycles until the next trial, at first and at most; each trial that changes nothing doubles them.

So trials take a tenth of the first cycles, and less than a hundredth in the long run."""

NEAR = 1.25
"""Factor of the best time per token up to which a window is tried that does not share acceptance
rates with others: a longer window tells of a shorter one with an error of about that much."""


@dataclass(slots=True)
class Load:
    """State for one number of running requests, rounded to a power of two.

    Attributes:
        value: chosen number of tokens per cycle.
        costs: seconds of passes, by role of the model.
        gain: seconds per token that the choice saves over plain decoding.
        wait_gain: the same for one request if all others draft anyway and it waits for them.
        read, reread: seconds to read one slot of a backlog by the draft, and again by the target.
        review, due: cycles of the next decision and of the next trial.
        patience: cycles between trials.
        trial: number of tokens on trial, 0 for none; it began in cycle `began`.
        trier: the request that tries it, where plain decoding is the choice for all others.
        tried: last cycle in which each number was chosen or tried.
    """

    value: int
    costs: dict[str, Cost] = field(default_factory=dict)
    gain: float = 0.0
    wait_gain: float = 0.0
    read: float = 0.0
    reread: float = 0.0
    review: int = 0
    due: int = 0
    patience: int = PATIENCE // 2
    trial: int = 0
    began: int = 0
    trier: object = None
    tried: dict[int, int] = field(default_factory=dict)

    def pays(self, gain: float, backlog: Backlog) -> bool:
        """Whether `gain` on all tokens that are left exceeds the time to catch up."""
        return backlog.left * gain >= backlog.unread * self.read + backlog.lost * self.reread


class PaceController:
    """Controls the draft length of one method for all of its requests.

    The engine reports the number of running requests and the time of every pass; a request reports
    the tokens of every cycle. A pass waits for its slowest request, so all draft or none does.
    """

    def __init__(self, dial: Dial) -> None:
        self.dial = dial
        self.least, *self.others = dial.values
        rows = [rows for role, rows, _ in dial.passes(self.least, self.least) if role == "target"]
        self.plain_rows = max(rows)
        """Rows of a plain cycle, for each request."""
        self.acceptance = Acceptance(nested=dial.nested)
        self.backlog = BacklogSum()
        self.load = Load(dial.values[-1])
        self.loads, self.requests = {0: self.load}, 1
        self.cycles = self.rest = 0
        self.plain = 0
        """Plain passes of the target in a row."""

    def run(self, requests: int) -> None:
        """Set the number of running requests; a new load starts from the costs of the nearest."""
        if requests == self.requests:
            return
        self.requests, key = requests, round(log2(requests))
        if key not in self.loads:
            near = self.loads[min(self.loads, key=lambda other: abs(other - key))]
            costs = {role: cost.elsewhere() for role, cost in near.costs.items()}
            self.loads[key] = Load(self.dial.values[-1], costs)
        if self.load is not self.loads[key]:
            self.load, self.rest = self.loads[key], 0

    def passed(self, model: str, rows: int, seconds: float) -> None:
        """Report a pass of a model; plain ones count once they are warm, or nothing is known."""
        cost = self.load.costs.setdefault(model, Cost())
        plain = model == "target" and rows <= self.requests * self.plain_rows
        if self.plain >= WARM or not plain or not cost.knows(rows):
            cost.add(rows, seconds)
        if model == "target":
            self.plain = self.plain + 1 if plain else 0
            self.cycles += 1

    def brought(self, value: int, tokens: int) -> None:
        """Report a cycle: tokens proposed, and tokens committed."""
        self.acceptance.add(value, tokens)

    def settled(self, behind: int, left: int) -> bool:
        """Whether a request drafts nothing for a while: a trial confirmed it, or it cannot pay."""
        backlog, load = Backlog(behind, left), self.load
        self.backlog.add(backlog, self.cycles, self.requests)
        if load.value != self.least:
            return not load.pays(load.gain, backlog)
        return load.patience > PATIENCE and not load.trial and self.cycles < load.due

    def value(
        self, request: object = None, behind: int = 0, left: int = maxsize, lost: int = 0
    ) -> int:
        """Return the number of tokens that the next cycle of a request proposes."""
        backlog, load = Backlog(behind, left, lost), self.load
        if self.cycles >= load.review:
            self.decide(load)
        total = self.backlog.add(backlog, self.cycles, self.requests)
        self.rest = 0
        if load.value == self.least:
            if load.trial:
                load.trier = load.trier or request
                alone = self.requests == 1 or request is load.trier
                return load.trial if alone else self.least
            self.rest = load.review
            return self.least
        if not load.pays(load.gain, total):
            self.rest = load.review = max(load.review, self.cycles + REVIEW)
            return self.least
        return load.trial or load.value if load.pays(load.wait_gain, backlog) else self.least

    def decide(self, load: Load) -> None:
        """Choose the best number at a load, begin or end a trial, and set the next decision."""
        load.review = self.cycles + 1
        if not self.others:
            load.review = maxsize
        elif not self.is_measured():
            load.review = self.cycles + WARM
        elif load.trial and self.is_running(load):
            return
        elif not self.is_known(self.least):
            self.begin_trial(load, [self.least])
        else:
            times = {value: self.seconds(value) / self.tokens(value) for value in self.dial.values}
            self.choose(load, times)
            self.weigh(load, times)
            self.plan(load, times)

    def choose(self, load: Load, times: dict[int, float]) -> None:
        """Choose the least time per token; a change, and an end of a trial, set the next trial."""
        was_plain = load.value == self.least
        load.value = min(self.others, key=times.__getitem__)
        if times[load.value] * (MARGIN if was_plain else 1.0) > times[self.least]:
            load.value = self.least
        changed = was_plain != (load.value == self.least)
        if changed or load.trial:
            load.patience = PATIENCE if changed else min(2 * load.patience, LONGEST)
            load.trial, load.trier, load.due = 0, None, self.cycles + load.patience
        load.tried[load.value] = self.cycles

    def plan(self, load: Load, times: dict[int, float]) -> None:
        """Begin a trial that is due, or set the next decision."""
        if not self.is_known(load.value):
            return
        if self.cycles >= load.due:
            self.begin_trial(load, self.rivals(load, times))
        elif load.value == self.least:
            load.review = load.due  # until then nothing new is measured
        else:
            load.review = min(self.cycles + REVIEW, load.due)

    def rivals(self, load: Load, times: dict[int, float]) -> list[int]:
        """Other numbers to try: plain decoding, the best other, windows that may be as good."""
        best = min(self.others, key=times.__getitem__)
        close = [value for value in self.others if times[value] <= NEAR * times[best]]
        rivals = [self.least, *([best] if self.dial.nested else close)]
        return [value for value in rivals if value != load.value]

    def begin_trial(self, load: Load, rivals: list[int]) -> None:
        """Try the number that was not run for the longest time."""
        load.trial = min(rivals, key=lambda value: load.tried.get(value, -1))
        load.began = load.tried[load.trial] = self.cycles
        for role, rows, times in self.passes(load.trial):
            if times:
                load.costs[role].renew(rows * self.requests)
        if load.value == self.least:
            self.acceptance.renew()

    def is_running(self, load: Load) -> bool:
        """Whether a trial lasts; a plain one until enough cycles ran in a row, if they ever do."""
        if self.cycles < load.began + TRIAL:
            return True
        late = self.cycles >= load.began + PATIENCE
        return load.trial == self.least and self.plain < TRIAL and not late

    def weigh(self, load: Load, times: dict[int, float]) -> None:
        """Set what the choice saves, and what a backlog costs."""
        load.gain = times[self.least] - times[load.value]
        load.wait_gain = self.seconds(load.value) - times[load.value]
        rows = {role: load.costs[role].row for role, *_ in self.passes(self.dial.values[-1])}
        load.reread = self.requests * rows.pop("target")
        # A draft reads no slower than the target, whose prompts are measured from the beginning.
        load.read = min(load.reread, self.requests * sum(rows.values()))

    def is_measured(self) -> bool:
        """Whether every model has run more than once."""
        roles = [role for role, _, times in self.passes(self.dial.values[-1]) if times]
        return not any(self.load.costs.get(role, Cost()).cold for role in roles)

    def is_known(self, value: int) -> bool:
        """Whether passes like those of a cycle that proposes so many were measured."""
        return all(
            self.load.costs[role].knows(rows * self.requests)
            for role, rows, times in self.passes(value)
            if times
        )

    def seconds(self, value: int) -> float:
        """Expected seconds of a cycle."""
        return sum(
            times * self.load.costs[role].at(rows * self.requests)
            for role, rows, times in self.passes(value)
            if times
        )

    def tokens(self, value: int) -> float:
        """Expected tokens of a cycle, never 0."""
        return max(self.acceptance.tokens(value), 1e-9)

    def passes(self, value: int) -> Passes:
        """Expected passes of a cycle."""
        return self.dial.passes(value, self.tokens(value))
