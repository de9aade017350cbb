"""What a client is sent: OpenAI's objects, and their chunks as bytes that are put together by hand.

A chunk costs a few microseconds, since many of them go out for each step of an engine.
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
"""More tokens than those of any character of UTF-8, whose first and last may hold others' bytes."""

Object = dict[str, Any]


def dumps(value: Any) -> str:
    """Compact JSON in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


class Offsets:
    """Where tokens begin in the text of an answer; those that share a character begin with it."""

    def __init__(self, model: Model) -> None:
        self.decode = model.text.decode
        self.place = 0
        self.open: list[int] = []

    def of(self, ids: Sequence[int]) -> list[int]:
        """Those of the tokens that come next."""
        begins = []
        for token in ids:
            begins.append(self.place)
            self.open.append(token)
            text = self.decode(self.open)
            if not text.endswith(UNKNOWN) or len(self.open) == SHARED:
                self.place, self.open = self.place + len(text), []
        return begins


@dataclass(kw_only=True)
class Reply:
    """The shape of what is sent for one request.

    Attributes:
        number: of the request, which makes its name.
        chat: whether it is a message, or plain text.
        method: as the client may see it.
        prompts: how many there are; each has as many choices as the others.
        usage: whether chunks have an entry for it, as OpenAI's have where it was asked for.
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
        """What every object begins with."""
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
        """One event with text of a choice, or with its end where `text` is None."""
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
        """An event without text."""
        return f'{self.head}"choices":[],{dumps(extra)[1:]}\n\n'

    def end(self, outputs: Sequence[Output], seeds: Sequence[int]) -> str:
        """The event behind all text."""
        figures = self.figures(outputs, seeds, trace=False)
        return self.aside(usage=usage(outputs, self.prompts), outpace=figures)

    def whole(self, outputs: Sequence[Output], seeds: Sequence[int], trace: bool) -> bytes:
        """The answer in one piece."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        figures = self.figures(outputs, seeds, trace)
        ends = {"choices": choices, "usage": usage(outputs, self.prompts), "outpace": figures}
        return dumps(self.base(kind) | ends).encode()

    def choice(self, index: int, output: Output) -> Object:
        """One of its choices."""
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
        """Log-probabilities of chosen tokens; None where nobody asked for them."""
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
        """How the choices were decoded; a list where there are several."""
        each = [
            self.figure(output, seed, trace) for output, seed in zip(outputs, seeds, strict=True)
        ]
        if len(each) == 1:
            return each[0]
        return [{"index": index, **figure} for index, figure in enumerate(each)]

    def figure(self, output: Output, seed: int, trace: bool) -> Object:
        """How one choice was decoded."""
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


def step(each: Step) -> Object:
    """An entry of a trace."""
    return {
        "model": each.model,
        "start": each.start,
        "rows": each.rows,
        "seen": each.seen,
        "kept": each.kept,
        "seconds": each.seconds,
        "pattern": each.pattern,
        "holes": [[hole.start, hole.stop] for hole in each.holes],
        "dial": each.dial,
    }


def usage(outputs: Sequence[Output], prompts: int) -> Object:
    """Tokens of all prompts, each counted once, and of all choices; those given are a prompt's."""
    per = len(outputs) // prompts
    asked = sum(output.prompt_tokens + output.given for output in outputs[::per])
    chosen = sum(output.chosen for output in outputs)
    return {"prompt_tokens": asked, "completion_tokens": chosen, "total_tokens": asked + chosen}
