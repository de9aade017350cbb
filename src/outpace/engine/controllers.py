"""Controllers of draft lengths, one for each method and its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outpace.decoding import Pace
from outpace.engine.job import Job
from outpace.engine.pairing import Pairing
from outpace.engine.pass_times import PassTimes
from outpace.engine.runner import Runner
from outpace.engine.scheduled_forward import ScheduledForward
from outpace.methods import Method
from outpace.pacing.controller import PaceController

MAX_CONTROLLERS = 256
"""Most combinations of method, options and models whose measurements are kept."""


class ControllerTable(dict[tuple[Method | str | None, ...], PaceController]):
    """A controller for each method, adapter and models; the oldest ones are dropped.

    With `pass_times` they start from times that earlier processes stored.
    """

    def __init__(self, pass_times: PassTimes | None = None) -> None:
        super().__init__()
        self.pass_times = pass_times
        self.runners: dict[PaceController, Mapping[str, Runner]] = {}
        """Models by role."""

    def controller_for(self, method: Method, pairing: Pairing, *, auto: bool) -> Pace | None:
        """Return the controller that requests of a method share; None where its length is fixed."""
        lengths = method.length_range(pairing.target, auto=auto)
        if lengths is None:
            return None
        key: tuple[Method | str | None, ...] = (
            method,
            pairing.adapter,
            *(runner.name for runner in pairing.runners.values()),
        )
        if (controller := self.get(key)) is None:
            times = self.pass_times
            stored = None if times is None else times.read_costs(pairing.runners)
            controller = self.setdefault(key, PaceController(lengths, stored))
            self.runners[controller] = pairing.runners
        while len(self) > MAX_CONTROLLERS:
            if (oldest := self.pop(list(self)[0], None)) is not None:
                del self.runners[oldest]
        return controller

    def store_times(self) -> None:
        """Store the times that all controllers measured, for later processes."""
        if self.pass_times is not None:
            self.pass_times.write_costs(
                (self.runners[each], each.measured_costs) for each in self.values()
            )

    def pass_controllers(
        self, work: Sequence[tuple[Job, ScheduledForward, ScheduledForward | None]], requests: int
    ) -> set[tuple[Pace, str]]:
        """Return the controllers that measure a pass with their roles, and set their load."""
        used = ((job.request.pace, forward.model) for job, forward, _ in work)
        controllers = {(pace, role) for pace, role in used if pace is not None}
        for pace, _ in controllers:
            pace.set_requests(requests)
        return controllers
