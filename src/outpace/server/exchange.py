"""A request from its body to its last byte: submitted, watched, answered whole or as a stream."""

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
"""Options that come from the text of a request: its `prompt`, or its `messages`."""

RETRY = {"Retry-After": "1"}

FEW = 16
"""Choices that are submitted at a time where each may wait until its constraint is read."""


class Exchange:
    """One request in hand. Raises `Fault` for what it may not ask."""

    def __init__(self, service: Service, asked: ChatRequest | CompletionRequest) -> None:
        service.check()
        self.service = service
        self.asked = asked
        self.clock = Clock()
        self.model = service.model(asked.model)
        self.extension = asked.extension
        self.rule = asked.rule
        choice = self.model.choice(self.extension.method)
        shown, self.method = choice.make(self.extension.options or {})
        check_fields(asked, shown)
        self.labels = (self.model.name, choice.name)
        self.prompts = prompts_of(asked, self.model.characters, self.model.entry.max_tokens)
        seed = asked.options.get("seed", service.random.getrandbits(32))
        self.seeds = [seed + i for _ in self.prompts for i in range(asked.n or 1)]
        check_count(asked, len(self.seeds), self.model.engine.most)
        self.reply = Reply(
            model=self.model,
            number=service.random.getrandbits(96),
            chat=isinstance(asked, ChatRequest),
            method=repr(shown),
            prompts=len(self.prompts),
            usage=asked.usage,
        )
        self.answers: list[PendingRequest] = []
        self.outputs: dict[int, Output] = {}
        self.task: asyncio.Task[Any]
        self.fault: Fault | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What every choice has alike, as the model takes it."""
        asked, options = self.asked, self.asked.options
        options["method"] = self.method
        options |= {"streams": asked.stream, "watched": asked.extension.provisional}
        if self.rule is not None:
            options[self.rule.option] = self.rule.value
        if isinstance(asked, ChatRequest):
            if asked.max_completion_tokens is not None:
                options["max_tokens"] = asked.max_completion_tokens
        else:
            options["raw"] = True
            options["logprobs"] = asked.logprobs is not None
        limit = options["limit"] = self.model.entry.max_tokens
        for option in LENGTHS:
            if limit is not None and options.get(option, 0) > limit:
                name = self.field(option)
                raise Fault(400, f"{name}: at most {limit} here", param=name)
        return {name: value for name, value in options.items() if value is not None}

    @asynccontextmanager
    async def submitted(self, receive: Receive) -> AsyncIterator[None]:
        """Submit all choices; whatever happens then, none of them is left behind."""
        options = self.options
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.service.exchanges.add(self)
        watcher = asyncio.ensure_future(self.watch(receive))
        result = "error"
        try:
            each = len(self.seeds) // len(self.prompts)
            submit = partial(self.model.engine.submit, **options)
            submits = [
                partial(submit, prompt, cloze=cloze, seed=seed)
                for number, (prompt, cloze) in enumerate(self.prompts)
                for seed in self.seeds[number * each :][:each]
            ]
            some = FEW if self.rule or self.extension.fill else len(submits)
            with self.guarded():
                for begin in range(0, len(submits), some):
                    part = [submit() for submit in submits[begin : begin + some]]
                    self.answers += await self.admitted(part)
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
        """Tell the metrics what became of it."""
        metrics = self.service.metrics
        metrics.requests.labels(*self.labels, result).inc()
        for output in self.outputs.values():
            metrics.answered(self.labels, output)
        if self.outputs:
            each = len(self.seeds) // len(self.prompts)
            first = (output for i, output in self.outputs.items() if i % each == 0)
            asked = sum(output.prompt_tokens + output.given for output in first)
            metrics.prompt.labels(*self.labels).inc(asked)
            self.clock.tell(metrics, self.labels)

    async def admitted(self, submits: Sequence[Awaitable[PendingRequest]]) -> list[PendingRequest]:
        """All choices, once they were let in; `Fault`, and none of them, where one was not."""
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
        """A refusal of the model, with the field that is to blame where the error names one."""
        if not isinstance(error, OptionError):
            return Fault(400, self.model.public(str(error)))
        name = self.field(error.option)
        code = "context_length_exceeded" if isinstance(error, ContextError) else None
        return Fault(400, self.model.public(str(error.renamed(name))), param=name, code=code)

    def field(self, option: str) -> str:
        """The field of the request that gave an option."""
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
        """End it when its client goes."""
        await gone(receive)
        self.end(Gone())

    def end(self, fault: Fault) -> None:
        """Give it up, whatever it waits for; its pages are free within a step."""
        self.fault = self.fault or fault
        self.task.cancel()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Decode; what goes wrong, and what gives it up, is a `Fault`."""
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
                500, f"decoding failed; the server's log has it under {self.reply.id}"
            )
            raise self.fault from None

    async def whole(self, receive: Receive) -> bytes:
        """The answer in one piece."""
        async with self.submitted(receive):
            with self.guarded():
                outputs = [await answer.output() for answer in self.answers]
            self.outputs = dict(enumerate(outputs))
            return self.reply.whole(outputs, self.seeds, bool(self.extension.trace))

    @property
    def ordered(self) -> list[Output]:
        """What became of all choices."""
        return [self.outputs[index] for index in range(len(self.answers))]

    async def stream(self, send: Send) -> None:
        """The answer as events, each written when some are ready."""
        strands = [
            Strand(self.reply, i, self.seeds[i], self.asked) for i in range(len(self.answers))
        ]

        async def write(text: str | bytes, more: bool = True) -> None:
            body = text if isinstance(text, bytes) else text.encode()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        rest = ""
        with self.guarded():
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        try:
            with self.guarded():
                async with aclosing(merged(self.answers)) as events:
                    async for index, event in events:
                        if event.output is not None:
                            self.outputs[index] = event.output
                        if text := "".join(strands[index].chunks(event)):
                            self.clock.tick()
                            if len(self.outputs) < len(self.answers):
                                await write(text)
                            else:  # what is last goes out with the end
                                rest = text
        except Fault as fault:
            end = fault.event
        else:
            end = rest.encode() + self.last() + DONE
        with suppress(Fault), self.guarded():
            await write(end, more=False)

    def last(self) -> bytes:
        """The event behind all text, where one was asked for."""
        if not (self.extension.trace or self.extension.provisional or self.asked.usage):
            return b""
        return self.reply.end(self.ordered, self.seeds).encode()


HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def together(submits: Sequence[Awaitable[PendingRequest]]) -> list[PendingRequest]:
    """All of these; where one fails, the others are left."""
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
    """What became of a request, as metrics have it."""
    if fault is None:
        return "answered"
    return "gone" if isinstance(fault, Gone) else "error" if fault.status == 500 else "refused"


def check_count(asked: Asked, choices: int, most: int) -> None:
    """Raise `Fault` for more choices than a model ever takes at a time: they could never start."""
    if choices > most:
        field = "prompt" if isinstance(asked, CompletionRequest) else "n"
        message = f"{choices} choices, counting n for each prompt; this model takes at most {most}"
        raise Fault(400, f"{field}: {message}", param=field)


def prompts_of(asked: Asked, most: int | None, limit: int | None) -> Sequence[tuple[Any, Any]]:
    """The prompts of a request, each with a text whose holes are to be filled, where it has one.

    Raises `Fault` for one that is longer than `most` characters, and as `clozes_of`.
    """
    if isinstance(asked, ChatRequest):
        field, texts = "messages", ["".join(message.text for message in asked.messages)]
        prompts: Sequence[Any] = [[message.plain() for message in asked.messages]]
    else:
        assert isinstance(asked, CompletionRequest)
        field, prompts = "prompt", asked.prompts
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if most is not None and any(len(text) > most for text in texts):
        message = f"{field}: too long for this model, which takes {most} characters at most"
        raise Fault(400, message, param=field, code="context_length_exceeded")
    if asked.extension.fill:
        assert isinstance(asked, ChatRequest | CompletionRequest)
        return [*clozes_of(asked, limit)]
    return [(prompt, None) for prompt in prompts]
