"""Two halves of the requests in turns: one is decided while the pass of the other runs.

The halves pay where a pass is bound by its products, so that half of one takes about half as long,
and where the host takes long enough to be worth hiding. Where a pass is bound by the weights that
it reads, two halves read them twice. (SGLang and vLLM split batches of a model in many processes in
this way, to hide what these tell one another.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from outpace.decoding.cost import Cost
from outpace.engine.feed import Feed
from outpace.engine.job import Job
from outpace.engine.readout import Launched
from outpace.engine.runner import Runner
from outpace.methods.method import check_type
from outpace.models.device import check_single_gpu

GAIN = 1.03
"""How many times as long all at once must take for halves to be worth it."""

SETTLED = 2
"""Passes behind a change of the way whose times tell nothing: one half was just launched."""

SPELL, SELDOM = 16, 1024
"""So many passes of so many are run the other way, where that might be faster."""

Work = tuple[Job, Feed, Feed | None]
"""A job, what it feeds in a pass, and what is left of its forward for a later one."""


class Flight(NamedTuple):
    """A pass that was launched at a time, by the clock of the trace and by that of the engine."""

    runner: Runner
    work: Sequence[Work]
    launched: Launched
    began: float
    start: float


def rows_of(work: Sequence[Work]) -> int:
    """Rows of a pass."""
    return sum(feed.size for _, feed, _ in work)


def half(work: list[Work]) -> list[Work]:
    """The first requests of a pass, with about half of its rows."""
    left = rows_of(work) / 2
    for count, (_, feed, _) in enumerate(work):
        if count and left <= feed.size / 2:
            return work[:count]
        left -= feed.size
    return work


class Overlap:
    """Decides between all at once and halves, by the seconds that either has taken of late.

    They are those from one launch of the main model to the next, with all that lies between, by
    the rows of all requests.
    """

    def __init__(self, forced: bool | None = None) -> None:
        self.forced = forced
        """Whether it is halves, whatever they take; None where that is decided."""
        self.flight: Flight | None = None
        """The pass of one half, which lands behind the launch of the other."""
        self.costs = {False: Cost(), True: Cost()}
        """Seconds of a round of all requests: at once, and in halves."""
        self.idle = Cost()
        """Seconds of a round at once in which no pass was in flight: all that can be won."""
        self.halves = bool(forced)
        self.passes = self.since = self.rows = 0
        self.began: float | None = None
        self.flown = 0.0

    @classmethod
    def of(cls, wanted: bool, device: torch.device, processes: int) -> Overlap:
        """What decides on a device, if it is wanted; `ValueError` where nothing can overlap."""
        check_type("overlap", wanted, bool)
        if wanted:
            check_single_gpu("overlap", device, processes)
        return cls(None if wanted else False)

    def waiting(self, running: Sequence[Job]) -> list[Job]:
        """Who waits for a model, but for those of the pass in flight."""
        away = {job for job, _, _ in self.flight.work} if self.flight is not None else set()
        return [job for job in running if job.runner is not None and job not in away]

    def together(self, running: Sequence[Job]) -> int:
        """Requests of a pass, about."""
        return max(len(running) // (2 if self.halves else 1), 1)

    def left(self) -> None:
        """Forget the pass in flight if nobody waits for it any longer."""
        if self.flight is not None and all(job.done for job, _, _ in self.flight.work):
            self.flight = None

    def landed(self, seconds: float) -> None:
        """A pass of any model came back after so long."""
        self.flown += seconds

    def pause(self) -> None:
        """Nothing is left to launch, so that time passes which no request takes."""
        self.flight = self.began = None

    def next(self, main: bool, work: Sequence[Work], now: float) -> bool:
        """Whether the requests go on in halves: decided at launches of the main model.

        The `work` is that of all of them, or of a half while the other is in flight.
        """
        if not main or self.forced is not None:
            return self.halves
        rows = rows_of(work) * (1 if self.flight is None else 2)
        if self.began is not None and self.since >= SETTLED:
            seconds = now - self.began
            self.costs[self.halves].add(self.rows, 2 * seconds if self.halves else seconds)
            if not self.halves:
                self.idle.add(self.rows, max(seconds - self.flown, 0.0))
        self.rows, self.began, self.flown = rows, now, 0.0
        self.passes += 1
        self.since += 1
        if (halves := self.chosen(rows)) is not self.halves:
            self.halves, self.since = halves, 0
            self.costs[halves].renew(rows)
        return halves

    def chosen(self, rows: int) -> bool:
        """What promises to be faster, and now and then the other."""
        whole, halves = self.costs[False], self.costs[True]
        if whole.cold:
            return False
        seconds = whole.at(rows)
        if seconds < GAIN * (seconds - self.idle.at(rows)):
            return False
        if halves.cold or not halves.knows(rows):
            return True
        faster = GAIN * halves.at(rows) < seconds
        return faster is not (self.passes % SELDOM >= SELDOM - SPELL)
