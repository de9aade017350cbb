"""One thread that drives the engines of a process for event loops."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event as Flag
from threading import Thread
from typing import Protocol, TypeVar

T = TypeVar("T")
LOG = logging.getLogger(__name__)
HOPS = 4
"""Turns of a loop after which those who were told have passed it on."""

SHARE = 0.01
"""Of its time a loop should spend on telling what is new at most; what comes meanwhile is told
together. The engine, the network and the client have as much to do with it again."""

LONGEST = 0.25
"""Seconds for which loops are told at most of nothing that can wait."""

TURN = 1e-5
"""Seconds after which a thread that reads a constraint lets others have their turn. An engine gives
its own up with every operation, and would wait for it the usual 5 ms each time."""


class WorkerDied(RuntimeError):
    """The thread that drives the engines has ended, so that nothing goes on."""


class Waiting(Protocol):
    """What somebody in a loop waits for."""

    news: asyncio.Event


class Member(Protocol):
    """An engine, and those who wait for it."""

    def advance(self) -> bool:
        """A step, and word of it to the loops; False where nothing is left."""

    def abandon(self) -> None:
        """End all that is in hand, since nobody drives any more."""


def in_turns(read: Callable[[], T]) -> T:
    """Read a constraint in a thread of its own, while another thread drives an engine."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    try:
        return read()
    finally:
        sys.setswitchinterval(usual)


class Worker:
    """A thread that steps the engines of several `AsyncLLM`s in turn, and sleeps when all are idle.

    Another one reads their constraints, one after the other.

    Attributes:
        heartbeat: reading of `time.monotonic` when the step that runs now began, 0 between steps.
        error: what ended the thread, if anything did.
        quiet: reading of `time.monotonic` up to which loops are told of nothing that can wait.
        due: whether loops are told of everything in this round of steps.
        unread: constraints that wait to be read, and the one that is read now.
    """

    def __init__(self) -> None:
        self.quiet = 0.0
        self.due = True
        self.members: list[Member] = []
        self.wake = Flag()
        self.closed = False
        self.heartbeat = 0.0
        self.error: BaseException | None = None
        self.unread = 0
        self.reading = ThreadPoolExecutor(1, thread_name_prefix="outpace-constraints")
        self.thread = Thread(target=self.run, name="outpace-worker", daemon=True)
        self.thread.start()

    @property
    def alive(self) -> bool:
        """Whether it goes on driving."""
        return self.error is None and not self.closed

    def run(self) -> None:
        """Step whoever has work, until closed or until an engine fails again and again."""
        try:
            while not self.closed:
                self.wake.clear()  # first, so that what comes from here on is seen
                self.due = time.monotonic() >= self.quiet  # for all, so that none comes too late
                busy = [self.step(member) for member in list(self.members)]
                if not any(busy):
                    self.wake.wait()
        except BaseException as error:
            LOG.exception("the worker has ended")
            self.error = error
        finally:
            self.heartbeat = 0.0
            for member in list(self.members):
                member.abandon()

    def step(self, member: Member) -> bool:
        """One step of one engine; whether it has more to do."""
        self.heartbeat = time.monotonic()
        more = member.advance()
        self.heartbeat = 0.0
        return more

    def tell(
        self, loop: asyncio.AbstractEventLoop, answers: Sequence[Waiting], *, all: bool
    ) -> None:
        """Let those who wait for these answers go on, in their loop.

        Where these are `all` that moved, a rest follows which is as long as they were costly. What
        could not wait is told in it, too, and neither cuts nor prolongs it.
        """
        began = time.thread_time()
        for answer in answers:
            answer.news.set()

        def done(turns: int = HOPS) -> None:
            if turns:
                loop.call_soon(done, turns - 1)
            else:
                now, rest = time.monotonic(), (time.thread_time() - began) / SHARE
                self.quiet = min(max(self.quiet, now) + rest, now + LONGEST)

        if all:
            done()

    async def read(self, read: Callable[[], object]) -> None:
        """Read a constraint, while engines and loops go on."""
        self.unread += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self.reading, in_turns, read)
        finally:
            self.unread -= 1

    def check(self) -> None:
        """Raise `WorkerDied` where it drives no more."""
        if not self.alive:
            raise WorkerDied(str(self.error or "the worker was closed"))

    async def join(self) -> None:
        """Nothing: whoever waits in a loop is told there."""

    async def measure(self) -> None:
        """Nothing: whoever asks can look."""

    def close(self) -> None:
        """End the thread; what is in hand ends with an error."""
        self.closed = True
        self.reading.shutdown(wait=False)
        self.wake.set()
