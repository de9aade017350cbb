"""Client of an engine loop in this or another process, for requests from event loops."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, Unpack

from outpace.api.engine_messages import EngineCommand, QueueFullError, SubmitCommand
from outpace.api.options import Options, RequestOptions, option_names
from outpace.api.parts import AnswerFormat
from outpace.api.pending_request import PendingRequest
from outpace.api.text import Prompt, TextCodec
from outpace.engine.runner import CacheUsage
from outpace.engine.stats import Stats

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
        CLOSED_MESSAGE: Error message of requests after `close`.
    """

    CLOSED_MESSAGE = "the engine loop was closed"

    def __init__(self) -> None:
        self.requests: dict[int, PendingRequest] = {}
        self.request_numbers = count()
        self.error: BaseException | None = None
        self.is_closed = False

    @property
    def is_alive(self) -> bool:
        """Whether the loop is running."""
        return self.error is None and not self.is_closed

    @property
    @abstractmethod
    def heartbeat(self) -> float:
        """Value of `time.monotonic` at the start of the current step; 0 between steps."""

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
    def close(self) -> None:
        """End the loop; pending requests end with an error."""

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
            LoadError: If the model is loaded for this request and that fails.
            EngineDiedError: If the engine loop has ended.
        """
        self.client.check_alive()
        self.check_accepting()
        request = PendingRequest(self, next(self.client.request_numbers))
        self.client.requests[request.number] = request
        self.requests.add(request)
        try:
            ids = None
            if prompt is not None:
                encode = partial(self.encode_request, prompt, options)
                found = await request.loop.run_in_executor(self.tokenizer_executor, encode)
                ids, request.format = found
                request.prompt = ids
            arguments = {"limit": limit, **options}
            # After the request is registered, so that `fail_requests` includes it.
            self.client.check_alive()
            self.client.send_command(
                SubmitCommand(request.number, self.name, ids, streams, watched, arguments)
            )
            await request.wait_until_admitted()
        except BaseException:
            request.cancel()
            raise
        return request

    def encode_request(
        self, prompt: Prompt, options: Mapping[str, Any]
    ) -> tuple[list[int], AnswerFormat]:
        """Return the token ids of a prompt, and the format of its answer."""
        names = option_names("prompt") + option_names("calls") + option_names("rule")
        request = RequestOptions.of({name: options[name] for name in names if name in options})
        raw, tools = request.raw, request.tool_use
        ids = self.text.encode(
            prompt,
            raw=raw,
            template=request.template,
            tools=tools,
            effort=request.reasoning_effort,
            suffix=request.suffix,
        )
        is_raw = raw or request.suffix is not None or options.get("cloze") is not None
        return ids, self.text.find_answer_format(ids, tools, raw=is_raw)

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
