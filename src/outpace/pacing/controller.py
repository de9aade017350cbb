"""Controller of the draft length: chooses the number with the most expected tokens per second.

Expected tokens are estimated from acceptance rates, expected seconds from measured passes. A choice
that does not run cannot be measured, so it is tried from time to time.
"""

from __future__ import annotations

from math import log2
from sys import maxsize

from outpace.decoding.dial import CyclePasses, Dial
from outpace.pacing.acceptance import Acceptance
from outpace.pacing.backlog import Backlog, BacklogSum
from outpace.pacing.cost import PassCost
from outpace.pacing.load import LoadState

START_MARGIN, STAY_MARGIN = 1.07, 1.025
"""Factors by which drafting must exceed plain decoding in tokens per second, to start and to stay.

Equal passes differ by about 5 %, and the few of a first decision by more. The rest covers the cost
of trials.
"""

TRIAL_CYCLES, WARM_CYCLES = 8, 4
"""Cycles of a trial, and between decisions; and cycles until passes have warmed up.

Plain cycles after drafting are up to 50 % slower, since the processor's caches still hold the
draft. Only the second half of their trial is measured.
"""

MIN_PATIENCE, MAX_PATIENCE = 64, 1024
"""Cycles until the next trial, at first and at most; a trial that changes nothing doubles them.

Trials therefore take a tenth of the first cycles, and less than a hundredth in the long run.
"""

NEAR_FACTOR = 1.25
"""Factor of the best time per token up to which windows that are not nested are tried.

A longer window estimates a shorter one with an error of about that much.
"""


class PaceController:
    """Controls the draft length of one method for all of its requests.

    The engine reports the number of running requests and the time of every pass; a request reports
    the tokens of every cycle. A pass waits for its slowest request, so either all requests draft or
    none.
    """

    def __init__(self, dial: Dial) -> None:
        self.dial = dial
        self.least, *self.others = dial.values
        rows = [rows for role, rows, _ in dial.passes(self.least, self.least) if role == "target"]
        self.plain_rows = max(rows)
        """Rows of a plain cycle, per request."""
        self.acceptance = Acceptance(nested=dial.nested)
        self.backlog = BacklogSum()
        self.load = LoadState(dial.values[-1])
        self.loads, self.requests = {0: self.load}, 1
        self.cycles = self.paused_until = 0
        self.plain_passes = 0
        """Consecutive plain passes of the target."""

    def set_requests(self, requests: int) -> None:
        """Set the number of running requests; a new load starts from the costs of the nearest."""
        if requests == self.requests:
            return
        self.requests, key = requests, round(log2(requests))
        if key not in self.loads:
            nearest = self.loads[min(self.loads, key=lambda other: abs(other - key))]
            costs = {role: cost.as_prior() for role, cost in nearest.costs.items()}
            self.loads[key] = LoadState(self.dial.values[-1], costs)
        if self.load is not self.loads[key]:
            self.load, self.paused_until = self.loads[key], 0

    def record_pass(self, model: str, rows: int, seconds: float) -> None:
        """Record a pass; plain ones count once they are warm, or where nothing is measured."""
        cost = self.load.costs.setdefault(model, PassCost())
        is_plain = model == "target" and rows <= self.requests * self.plain_rows
        if self.plain_passes >= WARM_CYCLES or not is_plain or not cost.covers(rows):
            cost.record_pass(rows, seconds)
        if model == "target":
            self.plain_passes = self.plain_passes + 1 if is_plain else 0
            self.cycles += 1

    def record_cycle(self, value: int, tokens: int) -> None:
        """Record a cycle: tokens proposed, and tokens committed."""
        self.acceptance.record_cycle(value, tokens)

    def skips_drafting(self, unread: int, remaining: int) -> bool:
        """Return whether a request skips drafting for a while: after a trial, or if too costly."""
        backlog, load = Backlog(unread, remaining), self.load
        self.backlog.add_backlog(backlog, self.cycles, self.requests)
        if load.value != self.least:
            return not load.pays_off(load.gain, backlog)
        return load.patience > MIN_PATIENCE and not load.trial and self.cycles < load.due

    def choose_length(
        self, request: object = None, unread: int = 0, remaining: int = maxsize, lost: int = 0
    ) -> int:
        """Return the number of tokens that the next cycle of a request proposes."""
        backlog, load = Backlog(unread, remaining, lost), self.load
        if self.cycles >= load.review:
            self.review_choice(load)
        total = self.backlog.add_backlog(backlog, self.cycles, self.requests)
        self.paused_until = 0
        if load.value == self.least:
            if load.trial:
                load.trier = load.trier or request
                is_trier = self.requests == 1 or request is load.trier
                return load.trial if is_trier else self.least
            self.paused_until = load.review
            return self.least
        if not load.pays_off(load.gain, total):
            self.paused_until = load.review = max(load.review, self.cycles + TRIAL_CYCLES)
            return self.least
        return load.trial or load.value if load.pays_off(load.wait_gain, backlog) else self.least

    def review_choice(self, load: LoadState) -> None:
        """Choose the best number at a load, begin or end a trial, and set the next decision."""
        most, load.review = self.expected_passes(self.dial.values[-1]), self.cycles + 1
        if not self.others:
            load.review = maxsize
        elif load.is_cold(most):
            load.review = self.cycles + WARM_CYCLES
        elif load.trial and self.is_running(load):
            return
        elif self.least not in load.tried:
            self.begin_trial(load, [self.least])
        else:
            times = {
                value: load.expected_seconds(self.expected_passes(value))
                / self.expected_tokens(value)
                for value in self.dial.values
            }
            self.choose_value(load, times)
            load.gain = times[self.least] - times[load.value]
            load.wait_gain = times[load.value] * (self.expected_tokens(load.value) - 1)
            load.set_read_costs(most, self.requests)
            self.plan_trial(load, times)

    def choose_value(self, load: LoadState, times: dict[int, float]) -> None:
        """Choose the least time per token; a change, and an end of a trial, set the next trial."""
        was_plain = load.value == self.least
        margin = START_MARGIN if was_plain or not load.due else STAY_MARGIN
        load.value = min(self.others, key=times.__getitem__)
        if times[load.value] * margin > times[self.least]:
            load.value = self.least
        if was_plain != (load.value == self.least):
            load.patience = MIN_PATIENCE
        elif load.trial:
            load.patience = min(2 * load.patience or MIN_PATIENCE, MAX_PATIENCE)
        else:
            return
        load.trial, load.trier, load.due = 0, None, self.cycles + load.patience

    def plan_trial(self, load: LoadState, times: dict[int, float]) -> None:
        """Begin a trial that is due, or set the next decision."""
        load.tried[load.value] = self.cycles
        if not load.is_measured(self.expected_passes(load.value)):
            return
        if self.cycles >= load.due:
            best = min(self.others, key=times.__getitem__)
            close = [value for value in self.others if times[value] <= NEAR_FACTOR * times[best]]
            rivals = [self.least, *([best] if self.dial.nested else close)]
            self.begin_trial(load, [value for value in rivals if value != load.value])
        elif load.value == self.least:
            load.review = load.due  # until then nothing new is measured
        else:
            load.review = min(self.cycles + TRIAL_CYCLES, load.due)

    def begin_trial(self, load: LoadState, rivals: list[int]) -> None:
        """Try the number that has not run for the longest time."""
        load.trial = min(rivals, key=lambda value: load.tried.get(value, -1))
        load.began = load.tried[load.trial] = self.cycles
        load.reset_weights(self.expected_passes(load.trial))
        if load.value == self.least:
            self.acceptance.reset_weights()

    def is_running(self, load: LoadState) -> bool:
        """Return whether a trial continues; a plain one until enough cycles ran in a row."""
        if self.cycles < load.began + TRIAL_CYCLES:
            return True
        late = self.cycles >= load.began + MIN_PATIENCE
        return load.trial == self.least and self.plain_passes < TRIAL_CYCLES and not late

    def expected_tokens(self, value: int) -> float:
        """Return the expected tokens of a cycle, never 0."""
        return max(self.acceptance.expected_tokens(value), 1e-9)

    def expected_passes(self, value: int) -> CyclePasses:
        """Return the expected passes of a cycle, with the rows of all requests."""
        passes = self.dial.passes(value, self.expected_tokens(value))
        return [(role, rows * self.requests, times) for role, rows, times in passes if times]
