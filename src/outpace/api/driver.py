"""One engine for any number of threads: any thread that waits moves all of them on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Condition, get_ident

from outpace.engine.engine import Engine
from outpace.engine.job import Job
from outpace.engine.stats import Stats

LOG = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds after which a thread looks for itself whether another has made its step."""

FAILURES = 3
"""Steps that may fail one after the other before whoever drives on and on gives up."""


class Driver:
    """Lets one thread at a time drive an engine, and all threads reach it.

    Requests enter and are cancelled through an inbox, which the driving thread empties before
    each step; so nobody touches the engine while it runs, and a finaliser may cancel from the
    thread of the garbage collector. There is no thread of its own: `step` drives, or waits for the
    step of another thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.inbox: deque[tuple[Job, bool]] = deque()
        self.turn = Condition()
        self.driver: int | None = None
        self.failures = 0

    @property
    def stats(self) -> Stats:
        """Those of the engine; requests that it has not received yet wait as well."""
        stats = Stats.of(self.engine)
        coming = sum(enters for _, enters in list(self.inbox))
        return stats._replace(waiting=stats.waiting + coming)

    def submit(self, job: Job) -> None:
        """Let a request in before the next step."""
        self.inbox.append((job, True))

    def cancel(self, job: Job) -> None:
        """End a request: at once, or where another thread drives, before its next step."""
        self.drop(job)
        self.drive(self.empty, wait=False)

    def drop(self, job: Job) -> None:
        """End a request before the next step of any thread; never waits."""
        self.inbox.append((job, False))

    def step(self) -> bool:
        """One step of the engine, of this thread or of another; False where nothing is left."""
        return self.drive(self.advance, wait=True)

    def go_on(self, name: str, step: Callable[[], bool]) -> bool:
        """A step of the model with this name, by whoever drives it on and on.

        One that fails is logged, and there is more to do. Raises where it fails again and again.
        """
        try:
            more = step()
        except Exception:
            LOG.exception("a step of %s failed", name)
            self.failures += 1
            if self.failures == FAILURES:
                raise
            return True
        self.failures = 0
        return more

    def drive(self, work: Callable[[], bool], *, wait: bool) -> bool:
        """Do something alone with the engine; where another thread drives, wait for its step."""
        mine = False
        try:
            with self.turn:
                if self.driver is not None:
                    if wait and self.driver == get_ident():
                        raise RuntimeError("a method or a listener cannot wait for other answers")
                    if wait:
                        self.turn.wait(PATIENCE)
                    return True
                self.driver, mine = get_ident(), True
            return work()
        finally:
            if mine:
                self.driver = None  # first, since Ctrl-C may come even here
                with self.turn:
                    self.turn.notify_all()

    def advance(self) -> bool:
        """Do what the inbox says, then a step."""
        self.empty()
        return self.engine.step()

    def empty(self) -> bool:
        """Do what the inbox says."""
        while self.inbox:
            job, enters = self.inbox[0]
            if enters:
                self.engine.enter(job)
            else:
                self.engine.cancel(job)
            self.inbox.popleft()
        return True
