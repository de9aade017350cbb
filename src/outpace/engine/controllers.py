"""Controllers of draft lengths, one for each method and its models."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.decoding import Pace
from outpace.engine.job import Job
from outpace.engine.pairing import Pairing
from outpace.engine.scheduled_forward import ScheduledForward
from outpace.methods import Method
from outpace.pacing.controller import PaceController

MAX_CONTROLLERS = 256
"""Most combinations of method, options and models whose measurements are kept."""


class ControllerTable(dict[tuple[Method | str, ...], Pace]):
    """A `Pace` for each method and its models; the oldest ones are dropped."""

    def controller_for(self, method: Method, pairing: Pairing, *, auto: bool) -> Pace | None:
        """Return the controller that requests of a method share; None where its length is fixed."""
        lengths = method.length_range(pairing.target, auto=auto)
        if lengths is None:
            return None
        names = (runner.name for runner in pairing.runners.values())
        controller = self.setdefault((method, *names), PaceController(lengths))
        while len(self) > MAX_CONTROLLERS:
            self.pop(list(self)[0], None)
        return controller

    def pass_controllers(
        self, work: Sequence[tuple[Job, ScheduledForward, ScheduledForward | None]], requests: int
    ) -> set[tuple[Pace, str]]:
        """Return the controllers that measure a pass with their roles, and set their load."""
        used = ((job.request.pace, forward.model) for job, forward, _ in work)
        controllers = {(pace, role) for pace, role in used if pace is not None}
        for pace, _ in controllers:
            pace.set_requests(requests)
        return controllers
