"""What requests of an engine share that have the same method and models."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.decoding import Pace
from outpace.engine.feed import Feed
from outpace.engine.job import Job
from outpace.engine.pairing import Pairing
from outpace.methods import Method
from outpace.pacing.controller import PaceController

PACES = 256
"""Methods, each with its options, of which is remembered what they have seen."""


class Paces(dict[tuple[Method | str, ...], Pace]):
    """A `Pace` for each method and its models; of too many, the first ones are forgotten."""

    def of(self, method: Method, pairing: Pairing, *, auto: bool) -> Pace | None:
        """What all requests of a method and its models share, if something may be decided."""
        dial = method.dial(pairing.target, auto=auto)
        if dial is None:
            return None
        names = (runner.name for runner in pairing.runners.values())
        pace = self.setdefault((method, *names), PaceController(dial))
        while len(self) > PACES:
            self.pop(list(self)[0], None)
        return pace

    def of_pass(
        self, work: Sequence[tuple[Job, Feed, Feed | None]], requests: int
    ) -> set[tuple[Pace, str]]:
        """The paces that measure a pass, with their roles; each notes how many requests run."""
        shared = ((job.request.pace, feed.model) for job, feed, _ in work)
        paced = {(pace, role) for pace, role in shared if pace is not None}
        for pace, _ in paced:
            pace.run(requests)
        return paced
