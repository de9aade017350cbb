"""Driver of one engine for any number of threads: any thread that waits advances all requests."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Condition, get_ident

from outpace.engine.engine import Engine
from outpace.engine.job import Job
from outpace.engine.runner import LayerReport
from outpace.engine.stats import Stats

LOG = logging.getLogger(__name__)

STEP_WAIT_SECONDS = 1.0
"""Seconds after which a waiting thread checks whether the other thread has finished its step."""

MAX_FAILED_STEPS = 3
"""Consecutive steps that may fail before `attempt_step` raises."""


class Driver:
    """Lets one thread at a time drive an engine, and any thread submit to it.

    Requests are submitted and cancelled through an inbox, which the driving thread empties before
    each step. No other thread touches the engine during a step, and a finalizer may cancel from the
    thread of the garbage collector. There is no background thread: `step` drives the engine, or
    waits for the step of another thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.inbox: deque[tuple[Job, bool]] = deque()
        self.step_finished = Condition()
        self.driving_thread: int | None = None
        self.failed_steps = 0

    @property
    def stats(self) -> Stats:
        """Statistics of the engine; requests still in the inbox count as waiting."""
        stats = Stats.from_engine(self.engine)
        coming = sum(enters for _, enters in list(self.inbox))
        return stats._replace(waiting=stats.waiting + coming)

    def submit(self, job: Job) -> None:
        """Queue a request, which enters the engine before the next step."""
        self.inbox.append((job, True))

    def cancel(self, job: Job) -> None:
        """Cancel a request now or, if another thread drives the engine, before the next step."""
        self.cancel_later(job)
        self.run_exclusively(self.process_inbox, wait=False)

    def cancel_later(self, job: Job) -> None:
        """Cancel a request before the next step of any thread, without waiting."""
        self.inbox.append((job, False))

    def step(self) -> bool:
        """Run one step of the engine, or wait for another thread's; False if no request is left."""
        return self.run_exclusively(self.process_and_step, wait=True)

    def attempt_step(self, name: str, step: Callable[[], bool]) -> bool:
        """Run a step in a loop that drives the engine; log a step that fails.

        Args:
            name: Name of the model, for the log.
            step: Function that runs the step; returns whether requests are left.

        Returns:
            Whether requests are left; True after a failed step.

        Raises:
            Exception: The error of the step, after `MAX_FAILED_STEPS` consecutive failures.
        """
        try:
            more = step()
        except Exception:
            LOG.exception("a step of %s failed", name)
            self.failed_steps += 1
            if self.failed_steps == MAX_FAILED_STEPS:
                raise
            return True
        self.failed_steps = 0
        return more

    def run_exclusively(self, work: Callable[[], bool], *, wait: bool) -> bool:
        """Run `work` with exclusive access to the engine.

        If another thread has the engine, return True, after its step if `wait` is set.

        Raises:
            RuntimeError: If a method or a callback inside a step waits for other answers.
        """
        mine = False
        try:
            with self.step_finished:
                if self.driving_thread is not None:
                    if wait and self.driving_thread == get_ident():
                        raise RuntimeError("a method or a callback cannot wait for other answers")
                    if wait:
                        self.step_finished.wait(STEP_WAIT_SECONDS)
                    return True
                self.driving_thread, mine = get_ident(), True
            return work()
        finally:
            if mine:
                self.driving_thread = None  # first: Ctrl-C may arrive even here
                with self.step_finished:
                    self.step_finished.notify_all()

    def process_and_step(self, report: LayerReport | None = None) -> bool:
        """Process the inbox, then step the engine."""
        self.process_inbox()
        return self.engine.step(report)

    def process_inbox(self) -> bool:
        """Apply the queued submissions and cancellations."""
        while self.inbox:
            job, enters = self.inbox[0]
            if enters:
                self.engine.enqueue(job)
            else:
                self.engine.cancel(job)
            self.inbox.popleft()
        return True
