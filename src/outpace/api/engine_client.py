"""The client of an engine loop: models that event loops ask, wherever the loop runs."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Unpack

from outpace.api.engine_loop import Cancel, Command, Progress, QueueFull, Submit
from outpace.api.options import Options, RequestOptions, names_of
from outpace.api.output import Event, Output
from outpace.api.text import Prompt, Text
from outpace.decoding import Step
from outpace.engine.runner import Usage
from outpace.engine.stats import Stats

NOTHING = Stats(waiting=0, running=0, models=())
"""Those of an engine that was not measured, or is not served any more."""


class Draining(RuntimeError):
    """No request is taken any more."""


class EngineDied(RuntimeError):
    """The engine loop has ended, so that nothing goes on."""


class EngineClient(ABC):
    """What an engine loop looks like to those who ask it.

    Attributes:
        requests: those that have not ended, by their numbers.
        error: what ended the loop, if anything did; `CLOSED` is the message of a closed one.
    """

    CLOSED = "the engine loop was closed"

    def __init__(self) -> None:
        self.requests: dict[int, PendingRequest] = {}
        self.numbers = count()
        self.error: BaseException | None = None
        self.closed = False

    @property
    def alive(self) -> bool:
        """Whether the loop goes on."""
        return self.error is None and not self.closed

    @property
    @abstractmethod
    def heartbeat(self) -> float:
        """Reading of `time.monotonic` when the step that runs now began, 0 where none is late."""

    @property
    @abstractmethod
    def stats(self) -> Mapping[str, Stats]:
        """Requests and memory of the engines, by the names of models."""

    @abstractmethod
    async def measure(self) -> None:
        """Bring `stats` up to date."""

    @abstractmethod
    def send(self, command: Command) -> None:
        """Send a command; never waits."""

    @abstractmethod
    def close(self) -> None:
        """End the loop; requests in hand end with an error."""

    @abstractmethod
    async def join(self) -> None:
        """Receive messages from now on, in the event loop that runs."""

    def check(self) -> None:
        """Raise `EngineDied` where the loop has ended."""
        if not self.alive:
            raise EngineDied(str(self.error or self.CLOSED))

    def fail(self) -> None:
        """End all requests, since the loop has ended."""
        for request in [*self.requests.values()]:
            request.fail(EngineDied(str(self.error or self.CLOSED)))


class ModelClient:
    """One model of an engine client; at most `most` requests of it may be in hand.

    Prompts are tokenised in a separate thread, so that a long one does not hold up the event loop.
    """

    def __init__(self, client: EngineClient, name: str, text: Text, most: int) -> None:
        self.client = client
        self.name = name
        self.text = text
        self.most = most
        self.draining = False
        self.requests: set[PendingRequest] = set()
        self.tokenising = ThreadPoolExecutor(1, thread_name_prefix="outpace-prompts")

    @property
    def running(self) -> int:
        """Requests in the engine."""
        return self.client.stats.get(self.name, NOTHING).running

    @property
    def waiting(self) -> int:
        """Requests that the engine has not admitted yet."""
        wanted = sum(not request.cancelled for request in self.requests.copy())
        return max(wanted - self.running, 0)

    @property
    def usage(self) -> Sequence[Usage]:
        """What its caches hold."""
        return self.client.stats.get(self.name, NOTHING).models

    async def submit(
        self,
        prompt: Prompt | None,
        *,
        streams: bool = False,
        watched: bool = False,
        limit: int | None = None,
        **options: Unpack[Options],
    ) -> PendingRequest:
        """Queue a prompt.

        `streams` asks for events before the last one, and `watched` for one after every forward,
        with the canvas. Without `max_tokens` an answer has at most `limit` tokens. Raises
        `ValueError` for bad input, `QueueFull`, `Draining` and `EngineDied`.
        """
        self.client.check()
        self.check()
        request = PendingRequest(self, next(self.client.numbers))
        self.client.requests[request.number] = request
        self.requests.add(request)
        try:
            ids = None
            if prompt is not None:
                encode = partial(self.encode, prompt, options)
                ids = await request.loop.run_in_executor(self.tokenising, encode)
            given = {"limit": limit, **options}
            self.client.check()  # after it has its place, so that the end of a loop misses none
            self.client.send(Submit(request.number, self.name, ids, streams, watched, given))
            await request.admission()
        except BaseException:
            request.cancel()
            raise
        return request

    def encode(self, prompt: Prompt, options: Mapping[str, Any]) -> list[int]:
        """Token ids of a prompt."""
        dressing = {name: options[name] for name in names_of("prompt") if name in options}
        chosen = RequestOptions.of(dressing)
        return self.text.encode(prompt, raw=chosen.raw, template=chosen.template)

    def check(self) -> None:
        """Raise `Draining` or `QueueFull` where no request is taken now."""
        if self.draining:
            raise Draining(f"{self.name} takes no more requests")
        if len(self.requests) >= self.most:
            raise QueueFull(f"{self.most} requests are in hand for {self.name}")

    def drain(self) -> None:
        """Take no more requests; those in hand go on."""
        self.draining = True

    async def drained(self) -> None:
        """Wait until no request is in hand."""
        while self.requests:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Take no more requests, for good."""
        self.drain()
        self.tokenising.shutdown(wait=False)


class PendingRequest:
    """A request on its way. Iterate over its events, or wait for its `output`.

    Attributes:
        loop: the event loop that waits for it.
        changed: set where something is new.
        events: those that were not consumed yet.
    """

    def __init__(self, model: ModelClient, number: int) -> None:
        self.model = model
        self.number = number
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.admitted = self.cancelled = False
        self.events: list[Event] = []
        self.steps: list[Step] = []
        self.result: Output | None = None
        self.error: BaseException | None = None

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Events in order; those that came together are one. Leaving the loop cancels."""
        try:
            over = False
            while not over:
                self.check()
                if not self.events:
                    await self.change()
                    continue
                events, self.events = self.events, []
                over = events[-1].output is not None
                yield events[0] if len(events) == 1 else joined(events)
        finally:
            self.cancel()

    async def output(self) -> Output:
        """Wait for the end; raises what its method raised."""
        try:
            while self.result is None:
                self.check()
                await self.change()
            return self.result
        finally:
            self.cancel()

    async def admission(self) -> None:
        """Wait until the engine takes it; raises why not."""
        while not self.admitted:
            self.check()
            await self.change()

    async def change(self) -> None:
        """Wait until something is new."""
        await self.changed.wait()
        self.changed.clear()

    def check(self) -> None:
        """Raise what ended it."""
        if self.error is not None:
            raise self.error

    def receive(self, progress: Progress) -> None:
        """Note what is new, in the event loop that waits."""
        if progress.error is not None:
            self.fail(progress.error)
            return
        self.admitted = True
        if progress.event is not None:
            self.add(progress.event, progress.steps)
        self.changed.set()

    def add(self, event: Event, steps: Sequence[Step]) -> None:
        """Keep an event, which comes without its steps, until it is consumed."""
        self.steps += steps
        if event.output is not None:
            self.result = replace(event.output, steps=self.steps)
            self.leave()
        if self.events:  # only the last canvas is ever shown
            self.events[-1] = replace(self.events[-1], canvas=())
        self.events.append(replace(event, steps=steps, output=self.result))

    def fail(self, error: BaseException) -> None:
        """End it with an error; from any thread."""
        self.leave()
        self.error = error
        with suppress(RuntimeError):  # its event loop may be closed
            self.loop.call_soon_threadsafe(self.changed.set)

    def cancel(self) -> None:
        """End it where it is; from any thread, any number of times.

        It takes its place until the engine has freed what it holds.
        """
        if not self.cancelled and self in self.model.requests:
            self.cancelled = True
            self.model.client.send(Cancel(self.number, self.model.name))
            if not self.admitted:
                self.leave()

    def leave(self) -> None:
        """Give its place to another request."""
        self.model.requests.discard(self)
        self.model.client.requests.pop(self.number, None)


def joined(events: Sequence[Event]) -> Event:
    """Events that came one after the other, as one."""
    scored = events[0].logprobs is not None
    return Event(
        text="".join(event.text for event in events),
        ids=[token for event in events for token in event.ids],
        chosen=sum(event.chosen for event in events),
        logprobs=[score for event in events for score in event.logprobs or ()] if scored else None,
        steps=[step for event in events for step in event.steps],
        canvas=events[-1].canvas,
        output=events[-1].output,
    )
