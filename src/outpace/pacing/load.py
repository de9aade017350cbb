"""Measurements of the controller at one load, and the drafts' backlog."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from outpace.decoding.draft_length import CyclePasses
from outpace.pacing.cost import CostPoints, PassCost


@dataclass(frozen=True, slots=True)
class Backlog:
    """Work before a draft can propose, and the tokens over which it can pay off."""

    unread: int = 0
    """Slots that the draft has not read yet."""
    remaining: int = 0
    """Tokens that the request may still generate."""
    lost: int = 0
    """Slots that the target has to read again, since their hidden states were not stored."""

    def __add__(self, other: Backlog) -> Backlog:
        return Backlog(
            self.unread + other.unread, self.remaining + other.remaining, self.lost + other.lost
        )


class BacklogSum:
    """Sum of the backlogs of all running requests, collected over a cycle."""

    def __init__(self) -> None:
        self.cycle = 0
        self.count = 0
        self.partial = Backlog()
        self.complete: Backlog | None = None

    def add_backlog(self, backlog: Backlog, cycle: int, requests: int) -> Backlog:
        """Add a request's backlog; return the last sum over all, or the partial one so far."""
        if cycle > self.cycle + 1:
            self.count, self.partial, self.complete = 0, Backlog(), None
        self.cycle = cycle
        self.partial += backlog
        self.count += 1
        if self.count >= requests:
            self.count, self.partial, self.complete = 0, Backlog(), self.partial
        return self.complete or self.partial


MIN_PATIENCE, MAX_PATIENCE = 64, 1024
"""Cycles until the next trial, at first and at most; a trial that changes nothing doubles them.

Trials therefore take a tenth of the first cycles, and less than a hundredth in the long run.
"""


CLEAR_DIFFERENCE = 1.25
"""Factor between passes at which their prior is dropped; equal passes differ by about 5 %."""


@dataclass(slots=True)
class LoadState:
    """State for one number of running requests, as a power of two, and one bucket of contexts."""

    value: int
    costs: dict[str, PassCost] = field(default_factory=dict)
    """Seconds of passes, by role of the model."""
    gain: float = 0.0
    """Seconds per token that the choice saves over plain decoding."""
    wait_gain: float = 0.0
    """The same for one request if all others draft anyway and it waits for them."""
    read: float = 0.0
    """Seconds to read one slot of a backlog by the draft."""
    reread: float = 0.0
    """Seconds to read it again by the target."""
    review: int = 0
    """Cycle of the next decision."""
    due: int = 0
    """Cycle of the next trial."""
    patience: int = 0
    """Cycles between trials."""
    trial: int = 0
    """Number of tokens on trial, 0 for none; it runs to cycle `until`."""
    until: int = 0
    explores: bool = False
    """Whether the trial is of a number that was never tried."""
    trier: object = None
    """The request that runs the trial, where plain decoding is the choice for all others."""
    tried: dict[int, int] = field(default_factory=dict)
    """Last cycle in which each number was chosen or tried."""
    plain_cycle: int = -1
    """Last cycle in which a warm plain pass was measured, -1 for none."""

    def as_guess(self) -> LoadState:
        """Return the state from which another load starts: the same choice, and costs as priors."""
        costs = {role: cost.as_prior() for role, cost in self.costs.items()}
        return LoadState(self.value, costs, self.gain, self.wait_gain, self.read, self.reread)

    def scale_priors(self) -> None:
        """Scale all priors by the passes measured here, or drop them where these contradict."""
        if not (levels := self.prior_levels):
            return
        if max(levels) > CLEAR_DIFFERENCE * min(levels):
            self.costs = {role: cost.without_prior() for role, cost in self.costs.items()}
            self.tried.clear()
            self.due = 0
            return
        for cost in self.costs.values():
            cost.set_level(fmean(levels))

    @property
    def prior_levels(self) -> list[float]:
        """Measured seconds over those of the priors, of all roles."""
        return [level for cost in self.costs.values() for level in cost.prior_levels]

    @property
    def least_ratios(self) -> dict[str, CostPoints]:
        """Least costs by role, over the target's shortest pass; none before priors are scaled."""
        costs = {
            role: cost.least_points
            for role, cost in self.costs.items()
            if cost.means and not cost.is_cold
        }
        if any(cost.prior for cost in self.costs.values()) and not self.prior_levels:
            return {}
        _, unit = min(costs.get("target", {}).values(), default=(0, 0.0))
        return {
            role: {step: (rows, seconds / unit) for step, (rows, seconds) in points.items()}
            for role, points in costs.items()
            if unit
        }

    def extend_patience(self) -> None:
        """Double the cycles until the next trial."""
        self.patience = min(2 * self.patience or MIN_PATIENCE, MAX_PATIENCE)

    def pays_off(self, gain: float, backlog: Backlog) -> bool:
        """Return whether `gain` on all remaining tokens exceeds the time to read a backlog."""
        return backlog.remaining * gain >= backlog.unread * self.read + backlog.lost * self.reread

    def is_cold(self, passes: CyclePasses) -> bool:
        """Return whether a model of these passes has not run more than once."""
        return any(self.costs.get(role, PassCost()).is_cold for role, *_ in passes)

    def is_measured(self, passes: CyclePasses) -> bool:
        """Return whether passes like all of these were measured."""
        return all(self.costs[role].covers(rows) for role, rows, _ in passes)

    def expected_seconds(self, passes: CyclePasses) -> float:
        return sum(times * self.costs[role].seconds_at(rows) for role, rows, times in passes)

    def least_seconds(self, passes: CyclePasses) -> float:
        """Return the seconds that these passes take at least, as far as was measured."""
        return sum(times * self.costs[role].least_seconds_at(rows) for role, rows, times in passes)

    def reset_weights(self, passes: CyclePasses) -> None:
        """Let the next passes like these count as much as all before."""
        for role, rows, _ in passes:
            self.costs[role].reset_weight(rows)

    def set_read_costs(self, passes: CyclePasses, requests: int) -> None:
        """Set what one slot of a backlog costs all requests, which wait while it is read."""
        rows = {role: self.costs[role].seconds_per_row for role, *_ in passes}
        self.reread = requests * rows.pop("target")
        # A draft reads no slower than the target, whose prefills are measured from the start.
        self.read = min(self.reread, requests * sum(rows.values()))
