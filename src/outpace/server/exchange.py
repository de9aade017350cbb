"""Handler of one HTTP request: submission, disconnects, whole and streamed answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

from starlette.types import Receive, Send

from outpace.api.engine_client import Draining, EngineDied, PendingRequest
from outpace.api.engine_loop import QueueFull
from outpace.api.output import Output
from outpace.constraint.pattern import TooLarge
from outpace.engine.job import DecodingError
from outpace.errors import ContextError, OptionError
from outpace.server.cloze import clozes_of
from outpace.server.fault import Fault, Gone
from outpace.server.fields import LENGTHS, check_fields, field_of
from outpace.server.metrics import Clock
from outpace.server.reply import DONE, Reply
from outpace.server.schema import Asked, ChatRequest, CompletionRequest
from outpace.server.service import Service
from outpace.server.stream import Strand, merged

log = logging.getLogger("outpace.server")

TEXT = ("prompt", "messages", "cloze", "holes", "hole")
"""Options set by the text of a request: its `prompt` or its `messages`."""

RETRY = {"Retry-After": "1"}

FEW = 16
"""Choices submitted together if each may wait for its constraint to be compiled."""


class Exchange:
    """One pending HTTP request.

    Raises:
        HttpError: If a field of the request is invalid here.
    """

    def __init__(self, service: Service, request: ChatRequest | CompletionRequest) -> None:
        service.check()
        self.service = service
        self.asked = request
        self.clock = Clock()
        self.model = service.model(request.model)
        self.extension = request.extension
        self.rule = request.rule
        choice = self.model.choice(self.extension.method)
        public_method, self.method = choice.make(self.extension.options or {})
        check_fields(request, public_method)
        self.labels = (self.model.name, choice.name)
        self.prompts = prompts_of(request, self.model.characters, self.model.entry.max_tokens)
        seed = request.options.get("seed", service.random.getrandbits(32))
        self.seeds = [seed + i for _ in self.prompts for i in range(request.n or 1)]
        check_count(request, len(self.seeds), self.model.engine.most)
        self.reply = Reply(
            model=self.model,
            number=service.random.getrandbits(96),
            chat=isinstance(request, ChatRequest),
            method=repr(public_method),
            prompts=len(self.prompts),
            usage=request.usage,
        )
        self.answers: list[PendingRequest] = []
        self.outputs: dict[int, Output] = {}
        self.task: asyncio.Task[Any]
        self.fault: Fault | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options shared by all choices, as the model accepts them."""
        request, options = self.asked, self.asked.options
        options["method"] = self.method
        options |= {"streams": request.stream, "watched": request.extension.provisional}
        if self.rule is not None:
            options[self.rule.option] = self.rule.value
        if isinstance(request, ChatRequest):
            if request.max_completion_tokens is not None:
                options["max_tokens"] = request.max_completion_tokens
        else:
            options["raw"] = True
            options["logprobs"] = request.logprobs is not None
        limit = options["limit"] = self.model.entry.max_tokens
        for option in LENGTHS:
            if limit is not None and options.get(option, 0) > limit:
                name = self.field(option)
                raise Fault(400, f"{name}: must be at most {limit} on this server", param=name)
        return {name: value for name, value in options.items() if value is not None}

    @asynccontextmanager
    async def submitted(self, receive: Receive) -> AsyncIterator[None]:
        """Submit all choices; cancel the remaining ones on exit."""
        options = self.options
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.service.exchanges.add(self)
        watcher = asyncio.ensure_future(self.watch(receive))
        result = "error"
        try:
            per_prompt = len(self.seeds) // len(self.prompts)
            submit = partial(self.model.engine.submit, **options)
            submits = [
                partial(submit, prompt, cloze=cloze, seed=seed)
                for number, (prompt, cloze) in enumerate(self.prompts)
                for seed in self.seeds[number * per_prompt :][:per_prompt]
            ]
            group_size = FEW if self.rule or self.extension.fill else len(submits)
            with self.guarded():
                for begin in range(0, len(submits), group_size):
                    group = [submit() for submit in submits[begin : begin + group_size]]
                    self.answers += await self.admitted(group)
            yield
            result = result_of(self.fault)
        except Fault as fault:
            result = result_of(fault)
            raise
        finally:
            watcher.cancel()
            self.service.exchanges.discard(self)
            for answer in self.answers:
                answer.cancel()
            self.count(result)

    def count(self, result: str) -> None:
        """Record the result and the tokens in the metrics."""
        metrics = self.service.metrics
        metrics.requests.labels(*self.labels, result).inc()
        for output in self.outputs.values():
            metrics.answered(self.labels, output)
        if self.outputs:
            per_prompt = len(self.seeds) // len(self.prompts)
            first = (output for i, output in self.outputs.items() if i % per_prompt == 0)
            prompt_tokens = sum(output.prompt_tokens + output.given for output in first)
            metrics.prompt.labels(*self.labels).inc(prompt_tokens)
            self.clock.tell(metrics, self.labels)

    async def admitted(self, submits: Sequence[Awaitable[PendingRequest]]) -> list[PendingRequest]:
        """Wait until all choices are admitted; else cancel all and raise `HttpError`."""
        try:
            return await together(submits)
        except QueueFull as error:
            raise Fault(429, self.model.public(str(error)), headers=RETRY) from None
        except Draining as error:
            raise Fault(503, self.model.public(str(error)), headers=RETRY) from None
        except EngineDied:
            raise Fault(503, "the engine has stopped", headers=RETRY) from None
        except ValueError as error:
            raise self.blamed(error) from None

    def blamed(self, error: ValueError) -> Fault:
        """Return a refusal by the model, with the invalid field if the error names one."""
        if not isinstance(error, OptionError):
            return Fault(400, self.model.public(str(error)))
        name = self.field(error.option)
        code = "context_length_exceeded" if isinstance(error, ContextError) else None
        return Fault(400, self.model.public(str(error.renamed(name))), param=name, code=code)

    def field(self, option: str) -> str:
        """Return the field of the request that set an option."""
        if self.rule is not None and option == self.rule.option:
            return self.rule.field
        if option in TEXT:
            return "messages" if self.reply.chat else "prompt"
        if option in self.model.choice(self.labels[1]).settings:
            return f"outpace.options.{option}"
        newer = getattr(self.asked, "max_completion_tokens", None) is not None
        if newer and option == "max_tokens":
            return "max_completion_tokens"
        return field_of(option)

    async def watch(self, receive: Receive) -> None:
        """Abort the request when its client disconnects."""
        await gone(receive)
        self.end(Gone())

    def end(self, fault: Fault) -> None:
        """Cancel the request; its cache pages are free within one step."""
        self.fault = self.fault or fault
        self.task.cancel()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Convert decoding errors and cancellation to `HttpError`."""
        try:
            yield
        except asyncio.CancelledError:
            if self.fault is None:
                raise
            self.task.uncancel()
            raise self.fault from None
        except (DecodingError, EngineDied) as error:
            if self.rule is not None and isinstance(error.__cause__, TooLarge):
                option = self.rule.option
                self.fault = self.blamed(OptionError(option, None, f"{option}: {error.__cause__}"))
                raise self.fault from None
            log.exception("request %s failed", self.reply.id)
            self.fault = Fault(
                500, f"decoding failed; see request {self.reply.id} in the server log"
            )
            raise self.fault from None

    async def whole(self, receive: Receive) -> bytes:
        """Return the whole answer as JSON."""
        async with self.submitted(receive):
            with self.guarded():
                outputs = [await answer.output() for answer in self.answers]
            self.outputs = dict(enumerate(outputs))
            return self.reply.whole(outputs, self.seeds, bool(self.extension.trace))

    @property
    def ordered(self) -> list[Output]:
        """Outputs of all choices, in order."""
        return [self.outputs[index] for index in range(len(self.answers))]

    async def stream(self, send: Send) -> None:
        """Send the answer as server-sent events, in batches of those that are ready."""
        streams = [
            Strand(self.reply, i, self.seeds[i], self.asked) for i in range(len(self.answers))
        ]

        async def write(text: str | bytes, more: bool = True) -> None:
            body = text if isinstance(text, bytes) else text.encode()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        last_text = ""
        with self.guarded():
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        try:
            with self.guarded():
                async with aclosing(merged(self.answers)) as events:
                    async for index, event in events:
                        if event.output is not None:
                            self.outputs[index] = event.output
                        if text := "".join(streams[index].chunks(event)):
                            self.clock.tick()
                            if len(self.outputs) < len(self.answers):
                                await write(text)
                            else:  # the last text is sent together with the final event
                                last_text = text
        except Fault as fault:
            end = fault.event
        else:
            end = last_text.encode() + self.last() + DONE
        with suppress(Fault), self.guarded():
            await write(end, more=False)

    def last(self) -> bytes:
        """Return the event after all text, if requested."""
        if not (self.extension.trace or self.extension.provisional or self.asked.usage):
            return b""
        return self.reply.end(self.ordered, self.seeds).encode()


HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def gone(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def together(submits: Sequence[Awaitable[PendingRequest]]) -> list[PendingRequest]:
    """Submit all choices; if one fails, cancel the others."""
    tasks = [asyncio.ensure_future(submit) for submit in submits]

    def leave(task: asyncio.Future[PendingRequest]) -> None:
        if not task.cancelled() and task.exception() is None:
            task.result().cancel()

    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
            task.add_done_callback(leave)
        raise


def result_of(fault: Fault | None) -> str:
    """Return the metric label for the result of a request."""
    if fault is None:
        return "answered"
    return "gone" if isinstance(fault, Gone) else "error" if fault.status == 500 else "refused"


def check_count(request: Asked, choices: int, maximum: int) -> None:
    """Raise `HttpError` for more choices than the model admits, which could never start."""
    if choices > maximum:
        field = "prompt" if isinstance(request, CompletionRequest) else "n"
        message = (
            f"at most {maximum} choices (n per prompt) are allowed for this model, got {choices}"
        )
        raise Fault(400, f"{field}: {message}", param=field)


def prompts_of(
    request: Asked, max_characters: int | None, limit: int | None
) -> Sequence[tuple[Any, Any]]:
    """Return the prompts of a request, each with its infill template or None.

    Raises:
        HttpError: If a prompt exceeds `max_characters` or is not a valid template.
    """
    if isinstance(request, ChatRequest):
        field, texts = "messages", ["".join(message.text for message in request.messages)]
        prompts: Sequence[Any] = [[message.plain() for message in request.messages]]
    else:
        assert isinstance(request, CompletionRequest)
        field, prompts = "prompt", request.prompts
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if max_characters is not None and any(len(text) > max_characters for text in texts):
        message = f"{field}: must have at most {max_characters} characters for this model"
        raise Fault(400, message, param=field, code="context_length_exceeded")
    if request.extension.fill:
        assert isinstance(request, ChatRequest | CompletionRequest)
        return [*clozes_of(request, limit)]
    return [(prompt, None) for prompt in prompts]
