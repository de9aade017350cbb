"""An LLM for asyncio: requests enter from an event loop, and one thread drives the engine."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Unpack

from outpace.api.llm import LLM
from outpace.api.options import Options
from outpace.api.output import Answer, Event, Output
from outpace.api.text import Prompt
from outpace.api.worker import Worker, WorkerDied
from outpace.constraint.compiler import Unread
from outpace.engine.runner import Usage
from outpace.errors import OptionError

MOST_UNREAD = 32
"""Requests that may wait until their constraints are read, since one may take a second."""


class QueueFull(RuntimeError):
    """Too many requests are in hand."""


class Draining(RuntimeError):
    """No request is taken any more."""


class Coming(ABC):
    """A request on its way. Iterate over its events, or wait for its `output`.

    `news` is set where something is new.
    """

    def __init__(self) -> None:
        self.news = asyncio.Event()

    @abstractmethod
    def latest(self) -> Event | None:
        """What is new, as one event; None where nothing is. Raises what went wrong."""

    @abstractmethod
    def outcome(self) -> Output | None:
        """What became of it; None while it goes on. Raises what went wrong."""

    @abstractmethod
    def cancel(self) -> None:
        """End it where it is, as often as one likes."""

    async def __aiter__(self) -> AsyncIterator[Event]:
        """What comes, in order; what came together is one event. Leaving the loop cancels."""
        try:
            over = False
            while not over:
                await self.news.wait()
                self.news.clear()
                if (event := self.latest()) is not None:
                    over = event.output is not None
                    yield event
        finally:
            self.cancel()

    async def output(self) -> Output:
        """What became of it; raises what its method raised."""
        try:
            while (output := self.outcome()) is None:
                await self.news.wait()
                self.news.clear()
            return output
        finally:
            self.cancel()


def check_open(name: str, draining: bool, hand: int, most: int) -> None:
    """Raise `Draining` or `QueueFull` where a model takes no request now, with so many in hand."""
    if draining:
        raise Draining(f"{name} takes no more requests")
    if hand >= most:
        raise QueueFull(f"{most} requests are in hand for {name}")


class AsyncAnswer(Coming):
    """A request on its way through the engine of this process."""

    def __init__(self, owner: AsyncLLM, streams: bool) -> None:
        super().__init__()
        self.owner = owner
        self.streams = streams
        self.loop = asyncio.get_running_loop()
        self.answer: Answer
        self.over = False
        self.told = False
        self.error: Exception | None = None

    def latest(self) -> Event | None:
        """All pieces since the event before, as one; raises what the method raised."""
        over = self.over  # read first: the last piece comes before it
        if not (over or self.answer.pieces):
            return None
        return self.answer.event(self.outcome() if over else None)

    def outcome(self) -> Output | None:
        """The output of a request that is over; raises `DecodingError` where its method failed."""
        if not self.over:
            return None
        if self.error is not None:
            raise self.error
        return self.answer.output()

    def take(self) -> None:
        """Note how far it has come, while the engine stands still."""
        if self.streams:
            self.answer.take()
        self.over, self.told = self.answer.job.over or self.over, True

    def urgent(self) -> bool:
        """Whether somebody waits for its first text, for its end, or for every forward."""
        job = self.answer.job
        return job.done or job.watched or not self.told

    def cancel(self) -> None:
        """End it where it is; from any thread, as often as one likes."""
        if not self.over:
            self.owner.llm.driver.drop(self.answer.job)
            self.owner.worker.wake.set()


class AsyncLLM:
    """An `LLM` that answers many requests of an event loop.

    A `worker` drives its engine: one of its own unless given, and several may share one. At most
    `max_waiting` requests wait behind those that the engine runs. Requests are tokenised in a
    thread of their own, so that a long prompt does not hold up the loop, and constraints that are
    new are read in one of the worker, so that only those wait for them who gave them.
    """

    def __init__(self, llm: LLM, *, worker: Worker | None = None, max_waiting: int = 256) -> None:
        if max_waiting < 0:
            message = f"max_waiting must be at least 0, not {max_waiting}"
            raise OptionError("max_waiting", max_waiting, message)
        self.llm = llm
        self.owns = worker is None
        self.worker = Worker() if worker is None else worker
        self.most = llm.engine.max_sequences + max_waiting
        self.draining = False
        self.coming = 0
        self.hand: set[AsyncAnswer] = set()
        self.moved: deque[AsyncAnswer] = deque()
        self.tokenising = ThreadPoolExecutor(1, thread_name_prefix="outpace-prompts")
        self.worker.members.append(self)

    @property
    def name(self) -> str:
        """That of the model."""
        return self.llm.name

    @property
    def running(self) -> int:
        """Requests in the engine."""
        return len(self.llm.engine.running)

    @property
    def waiting(self) -> int:
        """Requests that the engine has not let in yet."""
        return max(self.coming + len(self.hand) - self.running, 0)

    @property
    def usage(self) -> list[Usage]:
        """What the caches of its models hold."""
        return [runner.usage for runner in self.llm.engine.runners]

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Output:
        """Answer a prompt; a task that is cancelled cancels its request."""
        return await (await self.submit(prompt, **options)).output()

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncIterator[str]:
        """Pieces of an answer as they are committed; leaving the loop cancels the request."""
        answer = await self.submit(prompt, streams=True, **options)
        async for event in answer:
            if event.text:
                yield event.text

    async def submit(
        self,
        prompt: Prompt | None,
        *,
        streams: bool = False,
        watched: bool = False,
        limit: int | None = None,
        **options: Unpack[Options],
    ) -> AsyncAnswer:
        """Queue a prompt.

        `streams` asks for events on the way, and `watched` for one after every forward, with the
        canvas. Without `max_tokens` an answer has at most `limit` tokens. Raises `ValueError` for
        bad input, `QueueFull` and `Draining`.
        """
        self.check()
        answer = AsyncAnswer(self, streams or watched)
        told = partial(self.tell, answer)
        prepare = partial(self.llm.prepare, prompt, told=told, limit=limit, **options)
        self.coming += 1
        try:
            answer.answer = await self.prepared(answer.loop, prepare)
        finally:
            self.coming -= 1
        answer.answer.job.watched = watched
        self.hand.add(answer)
        self.worker.check()  # after it is in hand, so that none is left behind by a worker's end
        self.llm.driver.submit(answer.answer.job)
        self.worker.wake.set()
        return answer

    async def prepared(
        self, loop: asyncio.AbstractEventLoop, prepare: Callable[..., Answer]
    ) -> Answer:
        """A request with its prompt tokenised and its constraint read, each in another thread."""
        try:
            return await loop.run_in_executor(self.tokenising, partial(prepare, wait=False))
        except Unread as unread:
            read = unread.read
        if self.worker.unread >= MOST_UNREAD:
            raise QueueFull(f"{MOST_UNREAD} constraints wait to be read")
        await self.worker.read(read)
        # Where others are large, some of it may be forgotten again, and is then read here.
        return await loop.run_in_executor(self.tokenising, prepare)

    def check(self) -> None:
        """Raise where no request can be taken now."""
        self.worker.check()
        check_open(self.name, self.draining, self.coming + len(self.hand), self.most)

    def tell(self, answer: AsyncAnswer) -> None:
        """Note, in whatever thread drives, that there is something new."""
        done = answer.answer.job.done
        if (answer.streams or done) and not answer.over:
            self.moved.append(answer)
        if done:
            self.worker.wake.set()  # another thread may have driven while the worker slept

    def advance(self) -> bool:
        """A step of the engine, and word of it to the loops; False where nothing is left."""
        if not (self.hand or self.moved):
            return False
        drive = partial(self.llm.driver.drive, self.turn, wait=True)
        return self.llm.driver.go_on(self.name, drive)

    def turn(self) -> bool:
        """The same, alone with the engine."""
        more = self.llm.driver.advance()
        self.deliver(all=not more)
        return more or bool(self.moved)

    def deliver(self, *, all: bool) -> None:
        """Tell each loop once which of its answers moved: `all`, or those that cannot wait."""
        moved: dict[asyncio.AbstractEventLoop, list[AsyncAnswer]] = {}
        all = all or self.worker.due
        for answer in dict.fromkeys(self.moved.popleft() for _ in range(len(self.moved))):
            if all or answer.urgent():
                answer.take()
                moved.setdefault(answer.loop, []).append(answer)
            else:
                self.moved.append(answer)
        for loop, answers in moved.items():
            self.hand.difference_update([answer for answer in answers if answer.over])
            try:
                loop.call_soon_threadsafe(partial(self.worker.tell, loop, answers, all=all))
            except RuntimeError:  # the loop is closed, and nobody waits any more
                for answer in answers:
                    answer.cancel()

    def abandon(self) -> None:
        """End all that is in hand, since nobody drives any more."""
        for answer in list(self.hand):
            answer.error = WorkerDied(str(self.worker.error or "the worker was closed"))
            answer.over = True
            self.hand.discard(answer)
            with suppress(RuntimeError):  # its loop may be closed
                answer.loop.call_soon_threadsafe(answer.news.set)

    def drain(self) -> None:
        """Take no more requests; those in hand go on."""
        self.draining = True

    async def drained(self) -> None:
        """Wait until nothing is in hand."""
        while self.coming or self.hand:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Cancel what is in hand, and end a worker of one's own."""
        self.drain()
        for answer in list(self.hand):
            answer.cancel()
        self.tokenising.shutdown(wait=False)
        if self.owns:
            self.worker.close()
        else:
            self.worker.members.remove(self)
            self.abandon()
