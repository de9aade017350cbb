"""One choice of a streamed answer: events of the engine to events of the stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outpace.async_llm import Event
from outpace.server.reply import Reply, step
from outpace.server.schema import Asked


class Strand:
    """What of a choice has been sent.

    Text that is ready at the same time is sent in one chunk, unless a trace tells its forwards
    apart.
    """

    def __init__(self, reply: Reply, index: int, seed: int, asked: Asked) -> None:
        self.reply = reply
        self.index = index
        self.trace = bool(asked.extension.trace)
        self.provisional = bool(asked.extension.provisional)
        self.told = self.trace or self.provisional or asked.usage
        self.seed = seed
        self.first = True
        self.steps: list[Any] = []
        self.tokens = 0
        self.forwards = 0
        self.canvas: Sequence[int] = ()

    def chunks(self, events: Sequence[Event]) -> Iterator[str]:
        """What is sent of events that are ready."""
        if self.trace or self.provisional:
            for event in events:
                yield from self.chunk(event.text, [event])
        else:
            yield from self.chunk("".join(event.text for event in events), events)

    def chunk(self, text: str, events: Sequence[Event]) -> Iterator[str]:
        """The chunk with some text, what stands behind it, and the end."""
        scored = [event for event in events if event.logprobs is not None]
        scores = None
        if any(event.ids for event in scored):
            ids = [token for event in scored for token in event.ids]
            logprobs = [score for event in scored for score in event.logprobs or ()]
            scores = self.reply.scores(ids, logprobs)
        if self.trace:
            for event in events:
                self.note(event)
        output = events[-1].output
        if text or scores:
            yield self.reply.chunk(
                self.index, text, logprobs=scores, outpace=self.extra(), first=self.first
            )
            self.first = False
        if self.provisional and (canvas := events[-1].canvas) is not None and canvas != self.canvas:
            self.canvas = list(canvas)
            yield self.reply.aside(outpace={"index": self.index, "canvas": self.tokens_of(canvas)})
        if output is not None:
            if self.first:  # an answer without text has a role all the same
                yield self.reply.chunk(self.index, "", first=True)
            yield self.reply.chunk(
                self.index, None, finish=output.finish_reason, outpace=self.extra(end=True)
            )

    def note(self, event: Event) -> None:
        """Keep the steps of an event until a chunk tells them."""
        self.steps += map(step, event.steps)
        self.tokens += len(event.ids)
        self.forwards += sum(each.model == "target" for each in event.steps)

    def extra(self, end: bool = False) -> dict[str, Any] | None:
        """What a chunk says beside its text."""
        if not self.trace:
            return {"index": self.index, "seed": self.seed} if end and not self.told else None
        if end and not self.steps:
            return None
        steps, self.steps = self.steps, []
        counts = {"tokens": self.tokens, "forwards": self.forwards}
        return {"index": self.index, "steps": steps, **counts}

    def tokens_of(self, canvas: Sequence[int]) -> list[str | None]:
        """What lies behind the committed text; None for a hole."""
        return [None if token < 0 else self.reply.model.token(token) for token in canvas]
