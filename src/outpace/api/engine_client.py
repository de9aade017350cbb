"""Client of an engine loop in this or another process, for requests from event loops."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol, Unpack

from outpace.api.options import Options, RequestOptions
from outpace.api.output import Event, Output
from outpace.api.parts import PLAIN_FORMAT, AnswerFormat
from outpace.api.text import Prompt, TextCodec
from outpace.api.written import WrittenAnswers
from outpace.decoding import Step
from outpace.engine.runner import CacheUsage
from outpace.engine.stats import Stats


class QueueFullError(RuntimeError):
    """Too many requests are in flight."""


class LoadError(RuntimeError):
    """A model could not be loaded for a request; the next request tries again."""


class ConnectionEndedError(Exception):
    """No more commands can arrive."""


class SubmitCommand(NamedTuple):
    """Command to run a request.

    Attributes:
        number: Number of the request.
        model: Name of the model.
        prompt: Token ids; empty for an infill template without a prompt.
        format: Format of the answer.
        options: Options of the request.
        streams: Whether to send events before the last one.
        watched: Whether to send an event with the canvas after every forward.
        limit: Maximum number of tokens of an answer without `max_tokens`.
        fits: Whether a `max_tokens` above the room after the prompt is reduced to it.
    """

    number: int
    model: str
    prompt: list[int]
    format: AnswerFormat
    options: RequestOptions
    streams: bool
    watched: bool
    limit: int | None
    fits: bool = False


class CancelCommand(NamedTuple):
    """Command to cancel a request; if it was admitted, its last event is still sent."""

    number: int
    model: str


class RemoveCommand(NamedTuple):
    """Command to remove a model and all its requests, without a last event."""

    model: str


class InspectCommand(NamedTuple):
    """Command to send the statistics of all engines."""


EngineCommand = SubmitCommand | CancelCommand | RemoveCommand | InspectCommand


EngineMessage = Event | dict[str, Stats] | float
"""An event of a request, statistics, or the size of the pass in progress as a heartbeat."""

ChargeCallback = Callable[[float], None]
"""Receives the CPU seconds that a notification has cost."""


class CommandConnection(Protocol):
    """Connection of an engine loop to its clients."""

    def receive_commands(self, seconds: float | None) -> Sequence[EngineCommand]:
        """Wait up to `seconds` for commands. Raises `ConnectionEndedError`."""

    def send_messages(
        self, messages: Sequence[EngineMessage], charge: ChargeCallback | None
    ) -> None:
        """Send messages, and `charge` their cost elsewhere; raises `ConnectionEndedError`."""

    def report_layer(self, size: float) -> None:
        """Report that a layer begins, of this many times the ordinary size."""


EMPTY_STATS = Stats(waiting=0, running=0, models=())
"""Statistics of an engine that was not measured yet, or is no longer served."""


class DrainingError(RuntimeError):
    """The model is shutting down and accepts no more requests."""


class EngineDiedError(RuntimeError):
    """The engine loop has ended; all its requests have failed."""


class EngineClient(ABC):
    """Client of an engine loop.

    Attributes:
        requests: Unfinished requests by number.
        error: Exception that ended the loop, if any.
        layer_size: Size of a layer of the current pass, a factor on its time limit.
        CLOSED_MESSAGE: Error message of requests after `close`.
    """

    CLOSED_MESSAGE = "the engine loop was closed"

    def __init__(self) -> None:
        self.requests: dict[int, PendingRequest] = {}
        self.request_numbers = count()
        self.error: BaseException | None = None
        self.is_closed = False
        self.layer_size = 1.0

    @property
    def is_alive(self) -> bool:
        """Whether the loop is running."""
        return self.error is None and not self.is_closed

    @property
    @abstractmethod
    def heartbeat(self) -> float:
        """Value of `time.monotonic` at the last report of the current step; 0 between steps."""

    @property
    @abstractmethod
    def stats(self) -> Mapping[str, Stats]:
        """Requests and memory of each engine, by model name."""

    @abstractmethod
    async def update_stats(self) -> None:
        """Update `stats`."""

    @abstractmethod
    def send_command(self, command: EngineCommand) -> None:
        """Send a command without waiting."""

    @abstractmethod
    def close(self, seconds: float = 0.0) -> None:
        """End the loop, which may take some seconds; pending requests end with an error."""

    @abstractmethod
    async def start_receiving(self) -> None:
        """Start receiving messages in the running event loop."""

    def check_alive(self) -> None:
        """Raise `EngineDiedError` if the loop has ended."""
        if not self.is_alive:
            raise EngineDiedError(str(self.error or self.CLOSED_MESSAGE))

    def fail_requests(self) -> None:
        """Fail all requests after the loop has ended."""
        for request in [*self.requests.values()]:
            request.fail(EngineDiedError(str(self.error or self.CLOSED_MESSAGE)))


class ModelClient:
    """One model of an engine client.

    Prompts are tokenized in a separate thread, so a long prompt does not block the event loop.

    Args:
        client: Client of the loop that serves the model.
        name: Name of the model.
        text: Tokenizer of the model.
        most: Maximum number of requests in flight.
    """

    def __init__(self, client: EngineClient, name: str, text: TextCodec, most: int) -> None:
        self.client = client
        self.name = name
        self.text = text
        self.written_answers = WrittenAnswers(text)
        self.max_requests = most
        self.is_draining = False
        self.requests: set[PendingRequest] = set()
        self.tokenizer_executor = ThreadPoolExecutor(1, thread_name_prefix="outpace-prompts")

    @property
    def is_loaded(self) -> bool:
        """Whether the model was loaded when the statistics were last measured."""
        return self.name in self.client.stats

    @property
    def running(self) -> int:
        """Number of requests in the engine."""
        return self.client.stats.get(self.name, EMPTY_STATS).running

    @property
    def waiting(self) -> int:
        """Number of requests that the engine has not admitted yet."""
        active = sum(not request.is_cancelled for request in self.requests.copy())
        return max(active - self.running, 0)

    @property
    def cache_usage(self) -> Sequence[CacheUsage]:
        """Usage of the model's caches."""
        return self.client.stats.get(self.name, EMPTY_STATS).models

    async def submit(
        self,
        prompt: Prompt | None,
        *,
        streams: bool = False,
        watched: bool = False,
        **options: Unpack[Options],
    ) -> PendingRequest:
        """Submit a prompt, and wait until the engine admits it.

        Args:
            prompt: Text of a user message, token ids, or chat messages; None for an infill template
                without a prompt.
            streams: Whether to receive events before the last one.
            watched: Whether to receive an event with the canvas after every forward.
            **options: Options of the request, see `Options`.

        Returns:
            The pending request: iterate over its events, or await its `output`.

        Raises:
            ValueError: For an invalid prompt or option.
            QueueFullError: If too many requests are in flight.
            DrainingError: After `drain` or `close`.
            LoadError: If the model is loaded for this request and that fails.
            EngineDiedError: If the engine loop has ended.
        """
        read = partial(RequestOptions.of, options)
        return await self.submit_request(prompt, read, streams=streams, watched=watched)

    async def submit_request(
        self,
        prompt: Prompt | None,
        read_options: Callable[[], RequestOptions],
        *,
        streams: bool = False,
        watched: bool = False,
        limit: int | None = None,
        fits: bool = False,
    ) -> PendingRequest:
        """Submit a prompt as `submit` does, with options that the tokenizer's thread reads.

        `limit` and `fits` are those of `LLM.prepare_answer`.
        """
        self.client.check_alive()
        self.check_accepting()
        request = PendingRequest(self, next(self.client.request_numbers))
        # Registered before the first wait, so that requests that are tokenized count in the limit.
        self.client.requests[request.number] = request
        self.requests.add(request)
        try:
            read = partial(self.read_request, prompt, read_options)
            found = await request.loop.run_in_executor(self.tokenizer_executor, read)
            request.prompt, request.format, _ = found
            # After the request is registered, so that `fail_requests` includes it.
            self.client.check_alive()
            self.client.send_command(
                SubmitCommand(request.number, self.name, *found, streams, watched, limit, fits)
            )
            await request.wait_until_admitted()
        except BaseException:
            request.cancel()
            raise
        return request

    def read_request(
        self, prompt: Prompt | None, read_options: Callable[[], RequestOptions]
    ) -> tuple[list[int], AnswerFormat, RequestOptions]:
        """Return the token ids of a prompt, the format of its answer, and the checked options."""
        options = read_options()
        ids, form = self.text.encode_request(prompt, options)
        if isinstance(prompt, list) and isinstance(prompt[0], dict):
            ids = self.written_answers.restore(ids)
        return ids, form, options

    def check_accepting(self) -> None:
        """Raise `DrainingError` or `QueueFullError` if no request is accepted now."""
        if self.is_draining:
            raise DrainingError(f"{self.name} is shutting down and accepts no more requests")
        if len(self.requests) >= self.max_requests:
            raise QueueFullError(
                f"{self.name} already has {self.max_requests} requests in flight; try again later"
            )

    def drain(self) -> None:
        """Accept no more requests; those in flight continue."""
        self.is_draining = True

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        while self.requests:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Accept no more requests, and release the tokenizer thread."""
        self.drain()
        self.tokenizer_executor.shutdown(wait=False)


class PendingRequest:
    """A submitted request. Iterate over its events, or await its `output`.

    Attributes:
        loop: Event loop that waits for it.
        change_event: Set on progress.
        event: Progress that was not consumed yet.
        steps: All steps so far.
        format: Format of the answer.
        prompt: Token ids of the prompt; none for an infill template.
    """

    def __init__(self, model: ModelClient, number: int) -> None:
        self.model = model
        self.number = number
        self.loop = asyncio.get_running_loop()
        self.change_event = asyncio.Event()
        self.is_admitted = self.is_cancelled = False
        self.event: Event | None = None
        self.steps: list[Step] = []
        self.format, self.prompt = PLAIN_FORMAT, list[int]()
        self.result: Output | None = None
        self.error: BaseException | None = None

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield the progress so far as one event; leaving the loop cancels the request."""
        try:
            over = False
            while not over:
                self.raise_error()
                if self.event is None:
                    await self.wait_for_change()
                    continue
                event, self.event = self.event, None
                over = event.is_last
                yield event
        finally:
            self.cancel()

    async def output(self) -> Output:
        """Wait for the output; raises the error of the request, if any."""
        try:
            while self.result is None:
                self.raise_error()
                await self.wait_for_change()
            return self.result
        finally:
            self.cancel()

    async def wait_until_admitted(self) -> None:
        """Wait until the engine admits the request; raises the reason if it is rejected."""
        while not self.is_admitted:
            self.raise_error()
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Wait for progress."""
        await self.change_event.wait()
        self.change_event.clear()

    def raise_error(self) -> None:
        """Raise the error of the request, if any."""
        if self.error is not None:
            raise self.error

    def add_event(self, event: Event) -> None:
        """Add an event to the progress, in the event loop of the request."""
        if event.error is not None:
            self.fail(event.error)
            return
        if not self.is_admitted:
            self.is_admitted = True
        else:
            self.steps += event.steps
            if event.output is not None:
                event.output.steps.extend(self.steps)
                self.model.written_answers.add(self.prompt, event.output)
                self.result = event.output
                self.release_place()
            if self.event is None:
                self.event = event
            else:
                self.event.extend(event)
        self.change_event.set()

    def fail(self, error: BaseException) -> None:
        """End the request with an error, from any thread."""
        self.release_place()
        self.error = error
        with suppress(RuntimeError):  # its event loop may be closed
            self.loop.call_soon_threadsafe(self.change_event.set)

    def cancel(self) -> None:
        """Cancel the request, from any thread and any number of times.

        An admitted request counts against the limit until the engine has freed its memory.
        """
        if not self.is_cancelled and self in self.model.requests:
            self.is_cancelled = True
            self.model.client.send_command(CancelCommand(self.number, self.model.name))
            if not self.is_admitted:
                self.release_place()

    def release_place(self) -> None:
        """Stop counting the request against the limit."""
        self.model.requests.discard(self)
        self.model.client.requests.pop(self.number, None)
