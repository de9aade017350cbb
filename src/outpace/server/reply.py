"""Response bodies: OpenAI's objects, and their stream chunks formatted by hand.

A chunk takes a few microseconds, since each step of an engine sends many of them.
"""

from __future__ import annotations

import json
import string
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from outpace.api.output import Output, step_record
from outpace.api.parts import CallDelta, PartsDelta, assistant_message, call_object
from outpace.constraint.calls import ToolCall
from outpace.decoding.processor import top_tokens
from outpace.server.models import HostedModel

STREAM_END = b"data: [DONE]\n\n"

PING = ": ping\n\n"
"""A comment, which clients skip."""

ID_CHARACTERS = string.digits + string.ascii_letters

ReplyObject = dict[str, Any]

PromptScores = list[ReplyObject | None]
"""Log-probabilities of the tokens of a prompt in vLLM's form."""


def dump_json(value: Any) -> str:
    """Return compact ASCII JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def call_id(request: int, index: int, number: int) -> str:
    """Return the id of a call of a choice: nine letters and digits, as some templates need."""
    value, digits = request + 100_003 * index + number, ""
    for _ in range(9):
        value, digit = divmod(value, len(ID_CHARACTERS))
        digits += ID_CHARACTERS[digit]
    return digits


class TokenPlaces:
    """Places of tokens in a text: the token before each, and the complete characters before it."""

    def __init__(self, model: HostedModel) -> None:
        self.silent_ids = model.text.silent_ids
        self.decoder = model.text.begin_text()
        self.offset = 0

    def advance(self, ids: Sequence[int]) -> list[tuple[int | None, int]]:
        """Return the token before each of the next tokens, and its offset in characters."""
        places = []
        for token in ids:
            places.append((self.decoder.previous, self.offset))
            if token not in self.silent_ids:
                self.offset += len(self.decoder.push(token))
        return places


@dataclass(kw_only=True)
class Reply:
    """Format of everything sent for one request."""

    model: HostedModel
    number: int
    """Random number of the request, from which its id is made."""
    chat: bool
    """Whether answers are chat messages or plain text."""
    method: str
    """The method as shown to the client."""
    prompts: int = 1
    """Number of prompts; each has the same number of choices."""
    usage: bool = False
    """Whether chunks have a `usage` entry, as OpenAI's have if requested."""
    id: str = field(init=False)
    head: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number:024x}"
        start = dump_json(
            self.base_object("chat.completion.chunk" if self.chat else "text_completion")
        )
        self.head = f"data: {start[:-1]},"
        self.empty = ',"usage":null' if self.usage else ""

    def base_object(self, kind: str) -> ReplyObject:
        created = int(time.time())
        return {"id": self.id, "object": kind, "created": created, "model": self.model.name}

    def format_chunk(
        self,
        index: int,
        parts: PartsDelta | None,
        *,
        logprobs: ReplyObject | None = None,
        finish: str | None = None,
        outpace: ReplyObject | None = None,
        progress: ReplyObject | None = None,
        usage: ReplyObject | None = None,
        first: bool = False,
    ) -> str:
        """Return an event with parts of a choice, or its last event if `parts` is None."""
        if self.chat:
            content = "" if parts is None else ",".join(self.format_parts(index, parts, first))
            delta = f'"delta":{{{content}}}'
        else:
            delta = f'"text":{quoted("" if parts is None else parts.text)}'
        scores = "null" if logprobs is None else dump_json(logprobs)
        reason = "null" if finish is None else f'"{finish}"'
        extra = "" if outpace is None else f',"outpace":{dump_json(outpace)}'
        tokens = self.empty if usage is None else f',"usage":{dump_json(usage)}'
        if progress is not None:
            extra += f',"prompt_progress":{dump_json(progress)}'
        return (
            f'{self.head}"choices":[{{"index":{index},{delta},"logprobs":{scores},'
            f'"finish_reason":{reason}}}]{tokens}{extra}}}\n\n'
        )

    def format_parts(self, index: int, parts: PartsDelta, first: bool) -> Iterator[str]:
        """Yield the fields of a delta; the first has the role, and a content even if empty."""
        if first:
            yield '"role":"assistant"'
        other = parts.reasoning or parts.calls
        if parts.text or not other:
            yield f'"content":{quoted(parts.text)}'
        elif first:
            yield '"content":null'
        if parts.reasoning:
            yield f'"reasoning_content":{quoted(parts.reasoning)}'
        if parts.calls:
            entries = dump_json([self.format_call(index, each) for each in parts.calls])
            yield f'"tool_calls":{entries}'

    def format_call(self, index: int, delta: CallDelta) -> ReplyObject:
        if delta.name is None:
            return {"index": delta.number, "function": {"arguments": delta.arguments}}
        call = ToolCall(delta.name, delta.arguments)
        identity = call_id(self.number, index, delta.number)
        return {"index": delta.number, **call_object(identity, call)}

    def format_empty_chunk(self, **extra: Any) -> str:
        return f'{self.head}"choices":[],{dump_json(extra)[1:]}\n\n'

    def format_final_chunk(self, outputs: Sequence[Output], seeds: Sequence[int]) -> str:
        """Return the event after all text, with usage and statistics."""
        figures = self.format_statistics(outputs, seeds, trace=False)
        return self.format_empty_chunk(usage=token_usage(outputs, self.prompts), outpace=figures)

    def format_answer(
        self,
        outputs: Sequence[Output],
        seeds: Sequence[int],
        trace: bool,
        shown: Sequence[Output],
        prompt_scores: Sequence[PromptScores],
    ) -> bytes:
        """Return the whole answer as one object."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self.format_choice(index, output) for index, output in enumerate(shown)]
        figures = self.format_statistics(outputs, seeds, trace)
        ends = {"choices": choices, "usage": token_usage(outputs, self.prompts), "outpace": figures}
        if prompt_scores and self.chat:
            ends["prompt_logprobs"] = prompt_scores[0]
        elif prompt_scores:
            for choice, scores in zip(choices, prompt_scores, strict=True):
                choice["prompt_logprobs"] = scores
        return dump_json(self.base_object(kind) | ends).encode()

    def format_choice(self, index: int, output: Output) -> ReplyObject:
        content: ReplyObject = {"text": output.text}
        parts = output.parts
        if self.chat:
            message = assistant_message(parts, partial(call_id, self.number, index))
            content = {"message": {**message, "refusal": None}}
        scores = self.format_logprobs(output.ids, output.logprobs, TokenPlaces(self.model))
        return {
            "index": index,
            **content,
            "logprobs": scores,
            "finish_reason": "tool_calls" if parts.calls else output.finish_reason,
        }

    def format_logprobs(
        self, ids: Sequence[int], logprobs: Sequence[Any] | None, places: TokenPlaces
    ) -> ReplyObject | None:
        """Return log-probabilities of the chosen tokens; None if not requested."""
        if logprobs is None:
            return None
        before, offsets = zip(*places.advance(ids), strict=True) if ids else ((), ())
        if not self.chat:
            return {
                "tokens": [*map(self.model.token_text, ids, before)],
                "token_logprobs": list(logprobs),
                "top_logprobs": self.format_top_logprobs(logprobs, before),
                "text_offset": [*offsets],
            }
        entries = [
            {
                **self.format_logprob(token, score, previous),
                "top_logprobs": [
                    self.format_logprob(*each, previous) for each in top_tokens(score)
                ],
            }
            for token, score, previous in zip(ids, logprobs, before, strict=True)
        ]
        return {"content": entries, "refusal": None}

    def format_logprob(self, token: int, score: float, previous: int | None) -> ReplyObject:
        text = self.model.token_text(token, previous)
        data = self.model.token_bytes(token, previous)
        return {"token": text, "logprob": score, "bytes": [*data]}

    def format_top_logprobs(
        self, logprobs: Sequence[float | None], before: Sequence[int | None]
    ) -> PromptScores | None:
        """Return the most probable tokens of each place, by text; None if not requested."""
        # Of tokens with equal text, the most probable one is returned.
        found = [*map(top_tokens, logprobs)]
        if not any(found):
            return None
        text = self.model.token_text
        return [
            {text(token, previous): score for token, score in reversed(top)} if top else None
            for top, previous in zip(found, before, strict=True)
        ]

    def format_statistics(
        self, outputs: Sequence[Output], seeds: Sequence[int], trace: bool
    ) -> Any:
        """Return decoding statistics: an object for one choice, else a list."""
        statistics = [
            self.choice_statistics(output, seed, trace)
            for output, seed in zip(outputs, seeds, strict=True)
        ]
        if len(statistics) == 1:
            return statistics[0]
        return [{"index": index, **figure} for index, figure in enumerate(statistics)]

    def choice_statistics(self, output: Output, seed: int, trace: bool) -> ReplyObject:
        figure: ReplyObject = {
            "forwards": output.forwards,
            "tokens": output.chosen,
            "tokens_per_forward": output.tokens_per_forward,
            "seconds": output.seconds,
            "tokens_per_second": output.tokens_per_second,
            "method": self.method,
            "seed": seed,
            **output.draft_figures,
        }
        if output.format.calls is not None:
            figure["tools"] = output.format.calls.name
        if output.holes is not None:
            figure["holes"] = list(output.holes)
        if output.choice_logprobs is not None:
            scores = output.choice_logprobs.items()
            figure["choices"] = [{"text": text, "logprob": score} for text, score in scores]
        return figure | ({"steps": list(map(step_record, output.steps))} if trace else {})


def token_usage(outputs: Sequence[Output], prompts: int) -> ReplyObject:
    """Return token counts of all prompts, each counted once, and of all choices.

    Fixed tokens of an infill template count as prompt tokens.
    """
    first = outputs[:: len(outputs) // prompts]
    prompt_tokens = sum(output.input_tokens for output in first)
    cached = sum(output.cached_tokens for output in first)
    counts = token_counts(prompt_tokens, sum(output.chosen for output in outputs))
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def token_counts(prompt: int, completion: int) -> ReplyObject:
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
