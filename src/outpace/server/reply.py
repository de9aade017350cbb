"""Response bodies: OpenAI's objects, and their stream chunks formatted by hand.

A chunk takes a few microseconds, since each step of an engine sends many of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from outpace.api.output import Output
from outpace.api.text import UNKNOWN
from outpace.decoding import Step
from outpace.server.models import Model

DONE = b"data: [DONE]\n\n"
SHARED = 8
"""Upper bound for the tokens that share one UTF-8 character."""

Object = dict[str, Any]


def dumps(value: Any) -> str:
    """Return compact ASCII JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


class Offsets:
    """Character offsets of tokens; tokens that share a character have the same offset."""

    def __init__(self, model: Model) -> None:
        self.decode = model.text.decode
        self.place = 0
        self.open: list[int] = []

    def of(self, ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for token in ids:
            offsets.append(self.place)
            self.open.append(token)
            text = self.decode(self.open)
            if not text.endswith(UNKNOWN) or len(self.open) == SHARED:
                self.place, self.open = self.place + len(text), []
        return offsets


@dataclass(kw_only=True)
class Reply:
    """Format of everything sent for one request.

    Attributes:
        model: The model that answers.
        number: Random number of the request, from which its id is made.
        chat: Whether answers are chat messages or plain text.
        method: The method as shown to the client.
        prompts: Number of prompts; each has the same number of choices.
        usage: Whether chunks have a `usage` entry, as OpenAI's have if requested.
    """

    model: Model
    number: int
    chat: bool
    method: str
    prompts: int = 1
    usage: bool = False
    id: str = field(init=False)
    head: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number:024x}"
        start = dumps(self.base("chat.completion.chunk" if self.chat else "text_completion"))
        self.head = f"data: {start[:-1]},"
        self.empty = ',"usage":null' if self.usage else ""

    def base(self, kind: str) -> Object:
        """Return the fields common to all objects."""
        created = int(time.time())
        return {"id": self.id, "object": kind, "created": created, "model": self.model.name}

    def chunk(
        self,
        index: int,
        text: str | None,
        *,
        logprobs: Object | None = None,
        finish: str | None = None,
        outpace: Object | None = None,
        first: bool = False,
    ) -> str:
        """Return an event with text of a choice, or its last event if `text` is None."""
        if self.chat:
            role = '"role":"assistant",' if first else ""
            content = "" if text is None else f'{role}"content":{quoted(text)}'
            delta = f'"delta":{{{content}}}'
        else:
            delta = f'"text":{quoted(text or "")}'
        scores = "null" if logprobs is None else dumps(logprobs)
        reason = "null" if finish is None else f'"{finish}"'
        extra = "" if outpace is None else f',"outpace":{dumps(outpace)}'
        return (
            f'{self.head}"choices":[{{"index":{index},{delta},"logprobs":{scores},'
            f'"finish_reason":{reason}}}]{self.empty}{extra}}}\n\n'
        )

    def aside(self, **extra: Any) -> str:
        """Return an event without choices."""
        return f'{self.head}"choices":[],{dumps(extra)[1:]}\n\n'

    def end(self, outputs: Sequence[Output], seeds: Sequence[int]) -> str:
        """Return the event after all text, with usage and statistics."""
        figures = self.figures(outputs, seeds, trace=False)
        return self.aside(usage=usage(outputs, self.prompts), outpace=figures)

    def whole(self, outputs: Sequence[Output], seeds: Sequence[int], trace: bool) -> bytes:
        """Return the whole answer as one object."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        figures = self.figures(outputs, seeds, trace)
        ends = {"choices": choices, "usage": usage(outputs, self.prompts), "outpace": figures}
        return dumps(self.base(kind) | ends).encode()

    def choice(self, index: int, output: Output) -> Object:
        """Return one choice of the answer."""
        content: Object = {"text": output.text}
        if self.chat:
            message = {"role": "assistant", "content": output.text, "refusal": None}
            content = {"message": message}
        scores = self.scores(output.ids, output.logprobs, Offsets(self.model))
        return {
            "index": index,
            **content,
            "logprobs": scores,
            "finish_reason": output.finish_reason,
        }

    def scores(
        self, ids: Sequence[int], logprobs: Sequence[float] | None, offsets: Offsets
    ) -> Object | None:
        """Return log-probabilities of the chosen tokens; None if not requested."""
        if logprobs is None:
            return None
        tokens = [self.model.token(token) for token in ids]
        if not self.chat:
            return {
                "tokens": tokens,
                "token_logprobs": list(logprobs),
                "top_logprobs": None,
                "text_offset": offsets.of(ids),
            }
        entries = [
            {
                "token": token,
                "logprob": score,
                "bytes": None if "\ufffd" in token else list(token.encode()),
                "top_logprobs": [],
            }
            for token, score in zip(tokens, logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}

    def figures(self, outputs: Sequence[Output], seeds: Sequence[int], trace: bool) -> Any:
        """Return decoding statistics: an object for one choice, else a list."""
        statistics = [
            self.figure(output, seed, trace) for output, seed in zip(outputs, seeds, strict=True)
        ]
        if len(statistics) == 1:
            return statistics[0]
        return [{"index": index, **figure} for index, figure in enumerate(statistics)]

    def figure(self, output: Output, seed: int, trace: bool) -> Object:
        """Return decoding statistics of one choice."""
        figure: Object = {
            "forwards": output.forwards,
            "tokens": output.chosen,
            "tokens_per_forward": output.tokens_per_forward,
            "seconds": output.seconds,
            "tokens_per_second": output.tokens_per_second,
            "method": self.method,
            "seed": seed,
        }
        if output.holes is not None:
            figure["holes"] = list(output.holes)
        return figure | ({"steps": list(map(step, output.steps))} if trace else {})


def step(step: Step) -> Object:
    """Return a step of a trace as JSON fields."""
    return {
        "model": step.model,
        "start": step.start,
        "rows": step.rows,
        "seen": step.seen,
        "kept": step.kept,
        "seconds": step.seconds,
        "pattern": step.pattern,
        "holes": [[hole.start, hole.stop] for hole in step.holes],
        "dial": step.dial,
    }


def usage(outputs: Sequence[Output], prompts: int) -> Object:
    """Return token counts of all prompts, each counted once, and of all choices.

    Fixed tokens of an infill template count as prompt tokens.
    """
    per_prompt = len(outputs) // prompts
    prompt_tokens = sum(output.prompt_tokens + output.given for output in outputs[::per_prompt])
    completion_tokens = sum(output.chosen for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
