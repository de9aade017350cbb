"""Controller of the draft length: chooses the number with the most expected tokens per second.

Expected tokens are estimated from acceptance rates, expected seconds from measured passes. A choice
that does not run cannot be measured, so it is tried from time to time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from itertools import accumulate
from math import log2
from operator import mul
from sys import maxsize

from outpace.decoding.draft_length import CyclePasses, LengthRange
from outpace.pacing.cost import CONTEXT_LIMITS, CostPoints, LoadKey, PassCost, StoredCosts
from outpace.pacing.load import MAX_PATIENCE, MIN_PATIENCE, Backlog, BacklogSum, LoadState

PRIOR, PRIOR_WEIGHT = 0.75, 3
"""Acceptance rate assumed for a position that was not drafted yet, and its weight in cycles.

Published drafts are accepted at 0.6 to 0.9; three cycles outweigh a wrong prior.
"""

AVERAGED_CYCLES = 64
"""Cycles over which a rate is averaged: its standard error is then 0.06."""


class Acceptance:
    """Acceptance rate of each position of a draft, given that all before it were accepted."""

    # With `nested` draft lengths one list of rates serves all of them, since a longer draft begins
    # with the shorter one. Otherwise each draft length has a separate list, which starts as a copy
    # of the nearest longer one.

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
        nearest = min(
            self.rates, key=lambda other: (other < value, abs(other - value)), default=None
        )
        return [1.0] if nearest is None else self.rates[nearest]

    def reset_weights(self) -> None:
        """Give all estimates the weight of the prior, so that the next cycles count most."""
        for counts in self.counts.values():
            counts[:] = [min(count, PRIOR_WEIGHT) for count in counts]


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

MOST_REREAD = 64
"""Slots that a request reads again at most, after a trial of plain decoding."""

CLEAR_FACTOR = 2.0
"""Factor by which drafting is faster where plain decoding is seldom tried again.

Its measured passes are at most 50 % too slow.
"""

NEAR_FACTOR = 1.25
"""Factor of the best time per token up to which windows that are not nested are tried.

A longer window estimates a shorter one with an error of about that much.
"""


class PaceController:
    """Controls the draft length of one method for all of its requests.

    The engine reports the running requests, their context and the time of every pass; a request
    reports the tokens of every cycle.
    """

    # A pass waits for its slowest request, so either all requests draft or none. Each load (number
    # of requests and their context) therefore has one state, which moves along its cycles:
    #
    #     warm up     review     review       due                 until
    #   ──────────────┬──────────┬────────────┬───────────────────┬──────────> cycles
    #    most tokens  │ value    │ value      │ trial of a rival  │ value: the better of both
    #                 │          │            │                   │
    #                 └ compare ─┴─ compare ──┴ begin_trial       └ choose_value
    #
    #   value     tokens per cycle that all requests run; `least` is plain decoding
    #   review    cycle of the next comparison, TRIAL_CYCLES away; at `due` for plain decoding, of
    #             which nothing new is measured until then
    #   due       cycle of the next trial, `patience` cycles after the last one ended
    #   trial     rival that runs in place of `value` up to the cycle `until`: what does not run
    #             cannot be measured. Where `value` is plain, one request (`trier`) tries for all
    #   patience  MIN_PATIENCE after a change between plain and drafting; doubled by a trial that
    #             changes nothing, up to MAX_PATIENCE, so that trials cost ever less
    #   explores  the trial is of a number that never ran: it is shorter, and leaves `due` in place

    def __init__(self, lengths: LengthRange, stored: StoredCosts | None = None) -> None:
        self.lengths = lengths
        self.least, *self.others = lengths.values
        rows = [
            rows for role, rows, _ in lengths.passes(self.least, self.least) if role == "target"
        ]
        self.plain_rows = max(rows)
        """Rows of a plain cycle, per request."""
        self.acceptance = Acceptance(nested=lengths.nested)
        self.backlog = BacklogSum()
        self.cycles = self.paused_until = 0
        self.loads = {key: self.load_from_ratios(ratios) for key, ratios in (stored or {}).items()}
        self.load, self.requests = self.find_load((0, 0)), 1
        self.plain_passes = 0
        """Plain passes of the target since it last verified a draft; copies may lie between."""

    def set_load(self, requests: int, context: int) -> None:
        """Set the number of running requests and their mean tokens, prompts included."""
        self.requests = requests
        load = self.find_load((round(log2(requests)), bisect_left(CONTEXT_LIMITS, context)))
        if self.load is not load:
            self.load, self.paused_until = load, 0

    def load_from_ratios(self, ratios: Mapping[str, CostPoints]) -> LoadState:
        """Return the state of a load from ratios that an earlier process stored."""
        most = self.lengths.values[-1]
        load = LoadState(
            most, {role: PassCost(prior=dict(points)) for role, points in ratios.items()}
        )
        if {role for role, _, times in self.lengths.passes(most, most) if times} <= ratios.keys():
            # As after a trial of plain decoding, which the ratios replace: drafting begins at once.
            load.tried[self.least] = 0
            load.due = load.patience = MIN_PATIENCE
        return load

    def find_load(self, key: LoadKey) -> LoadState:
        """Return the state of a load; a new one starts from the nearest that was measured."""
        if key not in self.loads or not self.loads[key].costs:
            nearest = min(
                (other for other, load in self.loads.items() if load.costs),
                key=lambda other: (abs(other[0] - key[0]), abs(other[1] - key[1])),
                default=None,
            )
            self.loads[key] = (
                LoadState(self.lengths.values[-1])
                if nearest is None
                else self.loads[nearest].as_guess()
            )
        return self.loads[key]

    @property
    def measured_ratios(self) -> StoredCosts:
        """Costs that were measured, as ratios, for later controllers."""
        ratios = {key: load.least_ratios for key, load in self.loads.items()}
        return {key: by_role for key, by_role in ratios.items() if by_role}

    def record_pass(self, model: str, rows: int, seconds: float) -> None:
        """Record a pass; plain ones count once they are warm, or where nothing is measured."""
        cost = self.load.costs.setdefault(model, PassCost())
        is_plain = model == "target" and rows <= self.requests * self.plain_rows
        if self.plain_passes >= WARM_CYCLES or not is_plain or not cost.covers(rows):
            cost.record_pass(rows, seconds)
            if is_plain and self.plain_passes >= WARM_CYCLES:
                self.load.plain_cycle = self.cycles
        if model == "target":
            if is_plain:
                self.plain_passes += 1
            elif (self.load.trial or self.load.value) != self.least:
                self.plain_passes = 0
            self.cycles += 1

    def record_cycle(self, value: int, tokens: int) -> None:
        self.acceptance.record_cycle(value, tokens)

    def skips_drafting(self, unread: int, remaining: int) -> bool:
        """Return whether a request skips drafting for a while: after a trial, or if too costly."""
        backlog, load = Backlog(unread, remaining), self.load
        self.backlog.add_backlog(backlog, self.cycles, self.requests)
        if load.trial == self.least and unread <= MOST_REREAD:
            return True  # as it would run without drafting: hidden states take time, too
        if load.value != self.least:
            return not load.pays_off(load.gain, backlog)
        # Of many requests one tries, so that only it reads again; one alone stores at little cost.
        is_long = load.patience > MIN_PATIENCE or self.requests > 1
        return is_long and not load.trial and self.cycles < load.due

    def choose_length(
        self, request: object = None, unread: int = 0, remaining: int = maxsize, lost: int = 0
    ) -> int:
        backlog, load = Backlog(unread, remaining, lost), self.load
        if self.cycles >= load.review:
            self.review_choice(load)
        total = self.backlog.add_backlog(backlog, self.cycles, self.requests)
        self.paused_until = 0
        if load.value == self.least:
            # What a trial reads again must cost little beside the cycles since the last one.
            if load.trial and lost <= 2 * load.patience:
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
        load.scale_priors()
        most, load.review = self.expected_passes(self.lengths.values[-1]), self.cycles + 1
        if not self.others:
            load.review = maxsize
        elif load.is_cold(most):  # the first passes include warm-up
            load.review = self.cycles + WARM_CYCLES
        elif load.trial and self.is_running(load):
            return
        elif self.least not in load.tried and not load.is_measured(
            self.expected_passes(self.least)
        ):
            # Nothing can be compared without the time of plain decoding.
            self.begin_trial(load, [self.least])
        else:
            times = {
                value: load.expected_seconds(self.expected_passes(value))
                / self.expected_tokens(value)
                for value in self.lengths.values
            }
            self.choose_value(load, times)
            # A request with few tokens left drafts only if this gain repays reading its backlog.
            load.gain = times[self.least] - times[load.value]
            load.wait_gain = times[load.value] * (self.expected_tokens(load.value) - 1)
            load.set_read_costs(most, self.requests)
            if (unknown := self.find_unknown(load, times)) is None:
                self.plan_trial(load, times)
            else:
                load.explores = True
                self.begin_trial(load, [unknown])

    def choose_value(self, load: LoadState, times: dict[int, float]) -> None:
        """Choose the least time per token; a change, and an end of a trial, set the next trial."""
        was_plain = load.value == self.least
        margin = START_MARGIN if was_plain or not load.due else STAY_MARGIN
        load.value = min(self.others, key=times.__getitem__)
        if times[load.value] * margin > times[self.least]:
            load.value = self.least
        if was_plain != (load.value == self.least):
            load.patience = MIN_PATIENCE  # the load may be changing: look again soon
        elif load.explores:
            pass  # the next trial is as far away as before
        elif load.trial or not load.due:
            load.extend_patience()
        else:
            return
        load.trial, load.explores, load.trier = 0, False, None
        load.due = self.cycles + load.patience

    def find_unknown(self, load: LoadState, times: dict[int, float]) -> int | None:
        """Return a number that was never tried and may be far better than the choice."""
        # The cost rises in steps, so interpolation may hide the last number before one. The middle
        # of all such numbers is returned: its cost is a bound for the longer ones.
        least = {
            value: load.least_seconds(self.expected_passes(value)) / self.expected_tokens(value)
            for value in self.others
            if value not in load.tried
        }
        better = [value for value in least if least[value] * START_MARGIN < times[load.value]]
        return better[len(better) // 2] if better else None

    def plan_trial(self, load: LoadState, times: dict[int, float]) -> None:
        """Begin a trial that is due, or set the next decision."""
        load.tried[load.value] = self.cycles
        if not load.is_measured(self.expected_passes(load.value)):
            return
        if self.cycles >= load.due:
            # With nested lengths, passes of the longest measure the acceptance of all others.
            best = min(self.others, key=times.__getitem__)
            close = [value for value in self.others if times[value] <= NEAR_FACTOR * times[best]]
            rivals = {*([best] if self.lengths.nested else close)} - {load.value}
            if not self.is_plain_settled(load, times):
                rivals.add(self.least)
            if rivals:
                self.begin_trial(load, rivals)
            else:
                load.extend_patience()
                load.due = self.cycles + load.patience
        elif load.value == self.least:
            load.review = load.due  # until then nothing new is measured
        else:
            load.review = min(self.cycles + TRIAL_CYCLES, load.due)

    def is_plain_settled(self, load: LoadState, times: dict[int, float]) -> bool:
        """Return whether a trial of plain decoding can wait."""
        # Its passes were measured since the last trial, where a method had nothing to propose; or
        # drafting is far faster, and a trial of this process is not long ago.
        if load.plain_cycle > load.due - load.patience:
            return True
        is_known = load.is_measured(self.expected_passes(self.least))
        is_clear = times[self.least] > CLEAR_FACTOR * times[load.value]
        return is_known and is_clear and load.patience < MAX_PATIENCE // 2

    def begin_trial(self, load: LoadState, rivals: Collection[int]) -> None:
        load.trial = min(rivals, key=lambda value: load.tried.get(value, -1))
        load.tried[load.trial] = self.cycles
        load.until = self.cycles + (WARM_CYCLES if load.explores else TRIAL_CYCLES)
        # What was measured long ago must not outweigh the few cycles of the trial.
        load.reset_weights(self.expected_passes(load.trial))
        if load.value == self.least:
            self.acceptance.reset_weights()

    def is_running(self, load: LoadState) -> bool:
        """Return whether a trial continues; a plain one until enough cycles ran in a row."""
        if self.cycles < load.until:
            return True
        late = self.cycles >= load.until + MIN_PATIENCE
        return load.trial == self.least and self.plain_passes < TRIAL_CYCLES and not late

    def expected_tokens(self, value: int) -> float:
        """Return the expected tokens of a cycle, never 0."""
        return max(self.acceptance.expected_tokens(value), 1e-9)

    def expected_passes(self, value: int) -> CyclePasses:
        passes = self.lengths.passes(value, self.expected_tokens(value))
        return [(role, rows * self.requests, times) for role, rows, times in passes if times]
