"""Handler of one HTTP request: submission, disconnects, whole and streamed answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from time import perf_counter
from typing import Any, Unpack

from starlette.types import Receive, Send

from outpace.api.engine_client import (
    DrainingError,
    EngineDiedError,
    LoadError,
    PendingRequest,
    QueueFullError,
)
from outpace.api.options import Options, RequestOptions
from outpace.api.output import Output
from outpace.constraint.pattern import TooLargeError
from outpace.engine.job import DecodingError
from outpace.errors import ContextError, OptionError
from outpace.server.http_error import CONTEXT_CODE, ClientDisconnectedError, HttpError
from outpace.server.logs import add_request_fields
from outpace.server.method_choice import check_supported_fields, option_field
from outpace.server.metrics import RequestTimer
from outpace.server.prompts import check_choice_count, prompt_text, request_prompts
from outpace.server.reply import Reply
from outpace.server.schema import (
    TOOL_PARAM,
    ChatRequest,
    CompletionRequest,
    dotted_error,
    get_field,
)
from outpace.server.service import Service
from outpace.server.stream import CompletionWriter, merge_choice_events
from outpace.server.writer import AnswerWriter, Translation

LOG = logging.getLogger("outpace.server")

PROMPT_OPTIONS = ("prompt", "messages", "cloze", "holes", "hole")
"""Options set by the text of a request: its `prompt` or its `messages`."""

RETRY_HEADERS = {"Retry-After": "1"}

PING_SECONDS = 5.0
"""Silence of a stream after which a ping is sent: clients and proxies give up after a minute."""

CONSTRAINED_BATCH = 16
"""Choices submitted together if each may wait for its constraint to be compiled."""


class RequestHandler:
    """One pending HTTP request.

    Raises:
        HttpError: If a field of the request is invalid here.
    """

    def __init__(
        self,
        service: Service,
        request: ChatRequest | CompletionRequest,
        translation: Translation | None = None,
    ) -> None:
        service.check_ready()
        self.service = service
        self.request = request
        self.fits = translation is not None  # clients of other APIs send their own models' limits
        self.timer = RequestTimer()
        self.model = service.find_model(request.model)
        self.extension = request.extension
        self.constraint = request.constraint
        choice = self.model.find_method_choice(self.extension.method)
        public_method, self.method = choice.create(self.extension.options or {})
        check_supported_fields(request, public_method)
        self.labels = (self.model.name, choice.name)
        self.prompts = request_prompts(
            request, self.model.max_prompt_characters, self.model.entry.max_tokens
        )
        random, chosen = service.random.getrandbits(32), get_field(request, "seed")
        seed = random if chosen is None else chosen
        self.seeds = [seed + i for _ in self.prompts for i in range(request.n or 1)]
        check_choice_count(request, len(self.seeds), self.model.engine.max_requests)
        number = service.random.getrandbits(96)
        self.writer: AnswerWriter
        if translation is not None:
            self.writer = translation.open_writer(self.model, number)
        else:
            reply = Reply(
                model=self.model,
                number=number,
                chat=isinstance(request, ChatRequest),
                method=repr(public_method),
                prompts=len(self.prompts),
                usage=request.wants_usage,
            )
            self.writer = CompletionWriter(reply, request, self.seeds)
            if isinstance(request, CompletionRequest) and request.echo:
                self.writer.echoes = [prompt_text(self.model, prompt) for prompt, _ in self.prompts]
        self.pending: list[PendingRequest] = []
        self.outputs: dict[int, Output] = {}
        self.task: asyncio.Task[Any]
        self.fault: HttpError | None = None

    def read_options(self, **choice: Unpack[Options]) -> RequestOptions:
        """Return the options of a choice, as the model accepts them."""
        own: Options = {"method": self.method, "adapter": self.model.adapter, **choice}
        return self.request.to_options(most=self.model.entry.max_tokens, fits=self.fits, **own)

    @asynccontextmanager
    async def submit_choices(self, receive: Receive) -> AsyncIterator[None]:
        """Submit all choices; cancel the remaining ones on exit."""
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.service.pending.add(self)
        watcher = asyncio.ensure_future(self.watch_disconnect(receive))
        result = "error"
        try:
            per_prompt = len(self.seeds) // len(self.prompts)
            submit = partial(
                self.model.engine.submit_request,
                streams=bool(self.request.stream),
                watched=bool(self.extension.provisional),
                limit=self.model.entry.max_tokens,
                fits=self.fits,
            )
            submits = [
                partial(submit, prompt, partial(self.read_options, cloze=cloze, seed=seed))
                for number, (prompt, cloze) in enumerate(self.prompts)
                for seed in self.seeds[number * per_prompt :][:per_prompt]
            ]
            compiled = [get_field(self.request, name) for name in ("tools", "suffix")]
            compiles = self.constraint or self.extension.fill or compiled != [None, None]
            group_size = CONSTRAINED_BATCH if compiles else len(submits)
            with self.convert_errors():
                for begin in range(0, len(submits), group_size):
                    group = [submit() for submit in submits[begin : begin + group_size]]
                    self.pending += await self.await_admission(group)
            yield
            result = result_label(self.fault)
        except HttpError as fault:
            result = result_label(fault)
            raise
        finally:
            watcher.cancel()
            self.service.pending.discard(self)
            for answer in self.pending:
                answer.cancel()
            self.record_metrics(result)

    def record_metrics(self, result: str) -> None:
        """Record the result and the tokens in the metrics."""
        metrics = self.service.metrics
        metrics.requests.labels(*self.labels, result).inc()
        model, method = self.labels
        add_request_fields(model=model, method=method, result=result, id=self.writer.id)
        for output in self.outputs.values():
            metrics.count_answer(self.labels, output)
        if self.outputs:
            per_prompt = len(self.seeds) // len(self.prompts)
            first = [output for i, output in self.outputs.items() if i % per_prompt == 0]
            prompt_tokens = sum(output.input_tokens for output in first)
            metrics.prompt.labels(*self.labels).inc(prompt_tokens)
            metrics.cached.labels(*self.labels).inc(sum(output.cached_tokens for output in first))
            tokens = sum(output.chosen for output in self.outputs.values())
            speed = speed_fields([*self.outputs.values()])
            add_request_fields(prompt_tokens=prompt_tokens, completion_tokens=tokens, **speed)
            self.timer.report_metrics(metrics, self.labels)

    async def await_admission(
        self, submits: Sequence[Awaitable[PendingRequest]]
    ) -> list[PendingRequest]:
        """Wait until all choices are admitted; else cancel all and raise `HttpError`."""
        try:
            return await submit_together(submits)
        except QueueFullError as error:
            raise HttpError(429, self.model.hide_paths(str(error)), headers=RETRY_HEADERS) from None
        except (DrainingError, LoadError) as error:
            raise HttpError(503, self.model.hide_paths(str(error)), headers=RETRY_HEADERS) from None
        except EngineDiedError:
            raise HttpError(503, "the engine has stopped", headers=RETRY_HEADERS) from None
        except ValueError as error:
            raise self.validation_error(error) from None

    def validation_error(self, error: ValueError) -> HttpError:
        """Return the error of a rejected request, with the invalid field if the error names one."""
        if not isinstance(error, OptionError):
            return HttpError(400, self.model.hide_paths(str(error)))
        if TOOL_PARAM.match(error.param):
            named = dotted_error(error)
            return HttpError(400, self.model.hide_paths(str(named)), param=named.param)
        name = self.field_of_option(error.option)
        code = CONTEXT_CODE if isinstance(error, ContextError) else None
        return HttpError(
            400, self.model.hide_paths(str(error.with_param(name))), param=name, code=code
        )

    def field_of_option(self, option: str) -> str:
        """Return the field of the request that set an option."""
        if self.constraint is not None and option == self.constraint.option:
            return self.constraint.field
        if option in PROMPT_OPTIONS:
            return "messages" if isinstance(self.request, ChatRequest) else "prompt"
        if option in self.model.find_method_choice(self.labels[1]).options:
            return f"outpace.options.{option}"
        newer = getattr(self.request, "max_completion_tokens", None) is not None
        if newer and option == "max_tokens":
            return "max_completion_tokens"
        return option_field(option)

    async def watch_disconnect(self, receive: Receive) -> None:
        """Abort the request when its client disconnects."""
        await wait_for_disconnect(receive)
        self.abort(ClientDisconnectedError())

    def abort(self, fault: HttpError) -> None:
        """Cancel the request; its cache pages are free within one step."""
        self.fault = self.fault or fault
        self.task.cancel()

    @contextmanager
    def convert_errors(self) -> Iterator[None]:
        """Convert decoding errors and cancellation to `HttpError`."""
        try:
            yield
        except asyncio.CancelledError:
            if self.fault is None:
                raise
            self.task.uncancel()
            raise self.fault from None
        except (DecodingError, EngineDiedError) as error:
            if self.constraint is not None and isinstance(error.__cause__, TooLargeError):
                option = self.constraint.option
                self.fault = self.validation_error(OptionError(option, None, str(error.__cause__)))
                raise self.fault from None
            LOG.exception("request %s failed", self.writer.id)
            self.fault = HttpError(
                500, f"decoding failed; see request {self.writer.id} in the server log"
            )
            raise self.fault from None

    async def complete_answer(self, receive: Receive) -> bytes:
        """Return the whole answer as JSON."""
        async with self.submit_choices(receive):
            with self.convert_errors():
                outputs = [await answer.output() for answer in self.pending]
            self.outputs = dict(enumerate(outputs))
            return self.writer.format_answer(outputs, [each.prompt for each in self.pending])

    @property
    def ordered_outputs(self) -> list[Output]:
        """Outputs of all choices, in order."""
        return [self.outputs[index] for index in range(len(self.pending))]

    async def send_stream(self, send: Send) -> None:
        """Send the answer as server-sent events, in batches of those that are ready."""

        async def write(text: str | bytes, more: bool = True) -> None:
            body = text if isinstance(text, bytes) else text.encode()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        last_text = ""
        begin = self.writer.begin_stream(self.pending)
        with self.convert_errors():
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            if begin:
                await write(begin)
        pings = asyncio.ensure_future(self.send_pings(write))
        try:
            with self.convert_errors():
                async with aclosing(merge_choice_events(self.pending)) as events:
                    async for index, event in events:
                        if event.output is not None:
                            self.outputs[index] = event.output
                        if text := self.writer.format_event(index, event):
                            if event.steps:
                                self.timer.record_text()
                            if len(self.outputs) < len(self.pending):
                                await write(text)
                            else:  # the last text is sent together with the final event
                                last_text = text
        except HttpError as fault:
            end = self.writer.format_failure(fault)
        else:
            end = last_text.encode() + self.writer.end_stream(self.ordered_outputs)
        finally:
            pings.cancel()
        with suppress(HttpError), self.convert_errors():
            await write(end, more=False)

    async def send_refusal(self, send: Send, fault: HttpError) -> None:
        """Send a stream that only fails."""
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await send({"type": "http.response.body", "body": self.writer.format_failure(fault)})

    async def send_pings(self, write: Callable[[str], Awaitable[None]]) -> None:
        """Send a ping after each silence, for ever."""
        sent = perf_counter()
        while True:
            silence = perf_counter() - max(sent, self.timer.last)
            if silence < PING_SECONDS:
                await asyncio.sleep(PING_SECONDS - silence)
            else:
                await write(self.writer.format_ping())
                sent = perf_counter()


STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def submit_together(submits: Sequence[Awaitable[PendingRequest]]) -> list[PendingRequest]:
    """Submit all choices; if one fails, cancel the others."""
    tasks = [asyncio.ensure_future(submit) for submit in submits]

    def cancel_late(task: asyncio.Future[PendingRequest]) -> None:
        if not task.cancelled() and task.exception() is None:
            task.result().cancel()

    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
            task.add_done_callback(cancel_late)
        raise


def speed_fields(outputs: Sequence[Output]) -> dict[str, Any]:
    """Return the fields of a log line on how answers were computed; seconds are the longest."""
    read = [0.0 if each.prompt_step is None else each.prompt_step.seconds for each in outputs]
    return {
        "cached_tokens": sum(output.cached_tokens for output in outputs),
        "forwards": sum(output.forwards for output in outputs),
        "draft_tokens": sum(output.draft_tokens for output in outputs),
        "accepted_tokens": sum(output.accepted_tokens for output in outputs),
        "read_seconds": round(max(read), 4),
        "write_seconds": round(max(e.seconds - s for e, s in zip(outputs, read, strict=True)), 4),
    }


def result_label(fault: HttpError | None) -> str:
    """Return the metric label for the result of a request."""
    if fault is None:
        return "answered"
    return (
        "gone"
        if isinstance(fault, ClientDisconnectedError)
        else "error"
        if fault.status == 500
        else "refused"
    )
