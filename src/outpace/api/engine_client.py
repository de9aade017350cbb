"""Client of an engine loop in this or another process, for requests from event loops."""

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
"""Statistics of an engine that was not measured yet, or is no longer served."""


class Draining(RuntimeError):
    """The model is shutting down and accepts no more requests."""


class EngineDied(RuntimeError):
    """The engine loop has ended; all its requests have failed."""


class EngineClient(ABC):
    """Client of an engine loop.

    Attributes:
        requests: Unfinished requests by number.
        error: Exception that ended the loop, if any.
        CLOSED_MESSAGE: Error message of requests after `close`.
    """

    CLOSED = "the engine loop was closed"

    def __init__(self) -> None:
        self.requests: dict[int, PendingRequest] = {}
        self.numbers = count()
        self.error: BaseException | None = None
        self.closed = False

    @property
    def alive(self) -> bool:
        """Whether the loop is running."""
        return self.error is None and not self.closed

    @property
    @abstractmethod
    def heartbeat(self) -> float:
        """Value of `time.monotonic` at the start of the current step; 0 between steps."""

    @property
    @abstractmethod
    def stats(self) -> Mapping[str, Stats]:
        """Requests and memory of each engine, by model name."""

    @abstractmethod
    async def measure(self) -> None:
        """Update `stats`."""

    @abstractmethod
    def send(self, command: Command) -> None:
        """Send a command without waiting."""

    @abstractmethod
    def close(self) -> None:
        """End the loop; pending requests end with an error."""

    @abstractmethod
    async def join(self) -> None:
        """Start receiving messages in the running event loop."""

    def check(self) -> None:
        """Raise `EngineDiedError` if the loop has ended."""
        if not self.alive:
            raise EngineDied(str(self.error or self.CLOSED))

    def fail(self) -> None:
        """Fail all requests after the loop has ended."""
        for request in [*self.requests.values()]:
            request.fail(EngineDied(str(self.error or self.CLOSED)))


class ModelClient:
    """One model of an engine client.

    Prompts are tokenized in a separate thread, so a long prompt does not block the event loop.

    Args:
        client: Client of the loop that serves the model.
        name: Name of the model.
        text: Tokenizer of the model.
        most: Maximum number of requests in flight.
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
        """Number of requests in the engine."""
        return self.client.stats.get(self.name, NOTHING).running

    @property
    def waiting(self) -> int:
        """Number of requests that the engine has not admitted yet."""
        active = sum(not request.cancelled for request in self.requests.copy())
        return max(active - self.running, 0)

    @property
    def usage(self) -> Sequence[Usage]:
        """Usage of the model's caches."""
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
        """Submit a prompt, and wait until the engine admits it.

        Args:
            prompt: Text of a user message, token ids, or chat messages; None for an infill template
                without a prompt.
            streams: Whether to receive events before the last one.
            watched: Whether to receive an event with the canvas after every forward.
            limit: Maximum number of tokens of an answer without `max_tokens`.
            **options: Options of the request, see `Options`.

        Returns:
            The pending request: iterate over its events, or await its `output`.

        Raises:
            ValueError: For an invalid prompt or option.
            QueueFullError: If too many requests are in flight.
            DrainingError: After `drain` or `close`.
            EngineDiedError: If the engine loop has ended.
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
            arguments = {"limit": limit, **options}
            self.client.check()  # after the request is registered, so `fail_requests` includes it
            self.client.send(Submit(request.number, self.name, ids, streams, watched, arguments))
            await request.admission()
        except BaseException:
            request.cancel()
            raise
        return request

    def encode(self, prompt: Prompt, options: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a prompt."""
        prompt_options = {name: options[name] for name in names_of("prompt") if name in options}
        request = RequestOptions.of(prompt_options)
        return self.text.encode(prompt, raw=request.raw, template=request.template)

    def check(self) -> None:
        """Raise `DrainingError` or `QueueFullError` if no request is accepted now."""
        if self.draining:
            raise Draining(f"{self.name} is shutting down and accepts no more requests")
        if len(self.requests) >= self.most:
            raise QueueFull(
                f"{self.name} already has {self.most} requests in flight; try again later"
            )

    def drain(self) -> None:
        """Accept no more requests; those in flight continue."""
        self.draining = True

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        while self.requests:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Accept no more requests, and release the tokenizer thread."""
        self.drain()
        self.tokenising.shutdown(wait=False)


class PendingRequest:
    """A submitted request. Iterate over its events, or await its `output`.

    Attributes:
        loop: Event loop that waits for it.
        change_event: Set on progress.
        events: Events that were not consumed yet.
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
        """Yield events, merging those that are ready; leaving the loop cancels the request."""
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
        """Wait for the output; raises the error of the request, if any."""
        try:
            while self.result is None:
                self.check()
                await self.change()
            return self.result
        finally:
            self.cancel()

    async def admission(self) -> None:
        """Wait until the engine admits the request; raises the reason if it is refused."""
        while not self.admitted:
            self.check()
            await self.change()

    async def change(self) -> None:
        """Wait for progress."""
        await self.changed.wait()
        self.changed.clear()

    def check(self) -> None:
        """Raise the error of the request, if any."""
        if self.error is not None:
            raise self.error

    def receive(self, progress: Progress) -> None:
        """Apply progress, in the event loop of the request."""
        if progress.error is not None:
            self.fail(progress.error)
            return
        self.admitted = True
        if progress.event is not None:
            self.add(progress.event, progress.steps)
        self.changed.set()

    def add(self, event: Event, steps: Sequence[Step]) -> None:
        """Append an event, which is sent without its steps, until it is consumed."""
        self.steps += steps
        if event.output is not None:
            self.result = replace(event.output, steps=self.steps)
            self.leave()
        if self.events:  # only the last canvas is shown
            self.events[-1] = replace(self.events[-1], canvas=())
        self.events.append(replace(event, steps=steps, output=self.result))

    def fail(self, error: BaseException) -> None:
        """End the request with an error, from any thread."""
        self.leave()
        self.error = error
        with suppress(RuntimeError):  # its event loop may be closed
            self.loop.call_soon_threadsafe(self.changed.set)

    def cancel(self) -> None:
        """Cancel the request, from any thread and any number of times.

        An admitted request counts against the limit until the engine has freed its memory.
        """
        if not self.cancelled and self in self.model.requests:
            self.cancelled = True
            self.model.client.send(Cancel(self.number, self.model.name))
            if not self.admitted:
                self.leave()

    def leave(self) -> None:
        """Stop counting the request against the limit."""
        self.model.requests.discard(self)
        self.model.client.requests.pop(self.number, None)


def joined(events: Sequence[Event]) -> Event:
    """Merge consecutive events into one."""
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
