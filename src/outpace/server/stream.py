"""Streamed choices: engine events as chunks of the stream, and echoed prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from outpace.api.engine_client import PendingRequest
from outpace.api.output import Event, Output, step_record
from outpace.api.parts import PartsDelta
from outpace.decoding.processor import TokenLogprob
from outpace.server.http_error import HttpError
from outpace.server.models import HostedModel
from outpace.server.reply import PING, STREAM_END, Reply, ReplyObject, TokenPlaces, token_counts
from outpace.server.schema import BaseRequest
from outpace.server.writer import AnswerWriter

Answer = TypeVar("Answer", Output, Event)


class PromptEcho(NamedTuple):
    """A prompt that precedes its answer: its text and its token ids."""

    text: str
    ids: Sequence[int]

    def prepend_to(self, answer: Answer) -> Answer:
        """Return an answer, or its first event, after the prompt.

        Log-probabilities begin with those of the prompt, if the answer has any. That of the first
        token is None.
        """
        changes: dict[str, Any] = {"text": self.text + answer.text}
        if isinstance(answer, Event):
            changes["parts"] = PartsDelta(text=self.text).extend(answer.parts)
        scores = answer.prompt_logprobs
        if scores is not None and answer.logprobs is not None:
            changes["ids"] = [*self.ids, *answer.ids]
            changes["logprobs"] = join_scores(scores, answer.logprobs)
        return replace(answer, **changes)


def join_scores(prompt: Sequence[float | None], answer: Sequence[float]) -> Sequence[float | None]:
    return [*prompt, *answer]


def format_prompt_logprobs(
    model: HostedModel, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> list[dict[str, Any] | None]:
    """Return log-probabilities of a prompt in vLLM's form.

    Each token has an object of log-probability, rank and text by token id: of the most probable
    tokens and of the token itself. The first token has None.
    """
    found: list[dict[str, Any] | None] = []
    for token, previous, score in zip(ids, [None, *ids[:-1]], logprobs, strict=True):
        if score is None:
            found.append(None)
            continue
        ranked = [(each, value, rank) for rank, (each, value) in enumerate(score.top, 1)]
        if token not in {each for each, _, _ in ranked}:
            ranked.append((token, float(score), score.rank or 0))
        found.append(
            {
                str(each): {
                    "logprob": value,
                    "rank": rank,
                    "decoded_token": model.token_text(each, previous),
                }
                for each, value, rank in ranked
            }
        )
    return found


class ChoiceStream:
    """State of one streamed choice."""

    def __init__(
        self,
        reply: Reply,
        index: int,
        seed: int,
        request: BaseRequest,
        prompt_tokens: int,
        echo: PromptEcho | None,
    ) -> None:
        self.reply = reply
        self.index = index
        self.trace = bool(request.extension.trace)
        self.provisional = bool(request.extension.provisional)
        self.has_progress = bool(request.return_progress)
        self.has_final_event = self.trace or self.provisional or request.wants_usage
        self.seed = seed
        self.is_first = True
        self.places = TokenPlaces(reply.model)
        self.steps: list[Any] = []
        self.texts: list[str] = []
        self.last_token: int | None = None
        self.has_usage, self.prompt_tokens = request.wants_running_usage, prompt_tokens
        self.tokens = 0
        self.forwards = 0
        self.canvas: list[int] = []
        self.echo = echo

    def format_event(self, event: Event) -> Iterator[str]:
        """Yield the chunks for an event: progress, text, canvas, end."""
        scores, shown = None, event
        if event.progress is not None and self.has_progress:
            progress = event.progress._asdict()
            yield self.reply.format_chunk(self.index, None, progress=progress, usage=self.usage)
        if not event.steps and event.output is None:
            return
        self.tokens += event.chosen
        if self.echo is not None:  # in the first event
            shown, self.echo = self.echo.prepend_to(event), None
        if shown.logprobs:
            scores = self.reply.format_logprobs(shown.ids, shown.logprobs, self.places)
        if self.trace:
            self.buffer_trace(event)
        parts = shown.parts
        if parts or scores:
            yield self.format_parts(parts, scores)
        if self.provisional and (canvas := list(event.canvas)) != self.canvas:
            self.canvas = canvas
            extra = self.take_trace() if self.steps else None
            # The text of a token after itself is that after some token: with its space, if any.
            text = self.reply.model.token_text
            texts = [None if token < 0 else text(token, token) for token in canvas]
            state = {"index": self.index, "canvas": texts}
            usage = {"usage": self.usage} if self.has_usage else {}
            yield self.reply.format_empty_chunk(**usage, outpace=state | (extra or {}))
        if event.output is not None:
            self.prompt_tokens = event.output.input_tokens  # with the fixed tokens of a template
            if self.is_first:  # an empty answer has a role, too
                yield self.format_parts(parts)
            finish = "tool_calls" if event.output.tool_calls else event.output.finish_reason
            trace = self.take_trace(end=True)
            yield self.reply.format_chunk(
                self.index, None, finish=finish, outpace=trace, usage=self.usage
            )

    @property
    def usage(self) -> ReplyObject | None:
        """Token counts of the choice so far, if each chunk has them."""
        return token_counts(self.prompt_tokens, self.tokens) if self.has_usage else None

    def format_parts(self, parts: PartsDelta, scores: ReplyObject | None = None) -> str:
        first, self.is_first = self.is_first, False
        trace, usage = self.take_trace(), self.usage
        return self.reply.format_chunk(
            self.index, parts, logprobs=scores, outpace=trace, usage=usage, first=first
        )

    def buffer_trace(self, event: Event) -> None:
        self.steps += map(step_record, event.steps)
        before = [self.last_token, *event.ids]
        self.last_token = before[-1]
        self.texts += map(self.reply.model.token_text, event.ids, before)
        self.forwards += sum(each.model == "target" for each in event.steps)

    def take_trace(self, end: bool = False) -> dict[str, Any] | None:
        if not self.trace:
            return (
                {"index": self.index, "seed": self.seed}
                if end and not self.has_final_event
                else None
            )
        if end and not self.steps:
            return None
        trace = {"steps": self.steps, "texts": self.texts}
        self.steps, self.texts = [], []
        return {"index": self.index, **trace, "tokens": self.tokens, "forwards": self.forwards}


class CompletionWriter(AnswerWriter):
    """Answers of OpenAI's chats and completions."""

    def __init__(self, reply: Reply, request: BaseRequest, seeds: Sequence[int]) -> None:
        self.id = reply.id
        self.reply, self.request, self.seeds = reply, request, seeds
        self.streams: list[ChoiceStream] = []
        self.echoes: list[str] = []
        """Text of each prompt, if it precedes the answers."""

    def find_echo(self, index: int, prompt: Sequence[int]) -> PromptEcho | None:
        """Return the prompt that precedes the answer of a choice, if it does."""
        if not self.echoes:
            return None
        return PromptEcho(self.echoes[index * len(self.echoes) // len(self.seeds)], prompt)

    def begin_stream(self, pending: Sequence[PendingRequest]) -> str:
        """Begin a stream per choice, which starts without an event."""
        self.streams = [
            ChoiceStream(
                *(self.reply, index, self.seeds[index], self.request, len(each.prompt)),
                self.find_echo(index, each.prompt),
            )
            for index, each in enumerate(pending)
        ]
        return ""

    def format_ping(self) -> str:
        return PING

    def format_event(self, index: int, event: Event) -> str:
        return "".join(self.streams[index].format_event(event))

    def end_stream(self, outputs: Sequence[Output]) -> bytes:
        extension = self.request.extension
        has_scores = outputs[0].choice_logprobs is not None
        if not (extension.trace or extension.provisional or self.request.wants_usage or has_scores):
            return STREAM_END
        return self.reply.format_final_chunk(outputs, self.seeds).encode() + STREAM_END

    def format_answer(self, outputs: Sequence[Output], prompts: Sequence[Sequence[int]]) -> bytes:
        shown, scores = [], []
        for index, (output, prompt) in enumerate(zip(outputs, prompts, strict=True)):
            echo = self.find_echo(index, prompt)
            shown.append(output if echo is None else echo.prepend_to(output))
            if echo is None and output.prompt_logprobs is not None:
                scores.append(
                    format_prompt_logprobs(self.reply.model, prompt, output.prompt_logprobs)
                )
        trace = bool(self.request.extension.trace)
        return self.reply.format_answer(outputs, self.seeds, trace, shown, scores)

    def format_failure(self, fault: HttpError) -> bytes:
        return fault.event


async def merge_choice_events(
    answers: Sequence[PendingRequest],
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of all choices with the index of their choice."""
    if len(answers) == 1:  # no queue is needed
        async for event in answers[0]:
            yield 0, event
        return
    # With a slow reader, events accumulate in their request, which merges them into one.
    queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue(1)

    async def forward_events(index: int, answer: PendingRequest) -> None:
        try:
            async for event in answer:
                await queue.put((index, event))
        except Exception as error:
            await queue.put((index, error))

    pumps = [asyncio.ensure_future(forward_events(*each)) for each in enumerate(answers)]
    try:
        remaining = len(pumps)
        while remaining:
            index, each = await queue.get()
            if isinstance(each, Exception):
                raise each
            remaining -= each.output is not None
            yield index, each
    finally:
        for task in pumps:
            task.cancel()
