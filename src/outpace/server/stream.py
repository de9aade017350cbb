"""Streamed choices: engine events converted to chunks of the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from outpace.api.engine_client import PendingRequest
from outpace.api.output import Event
from outpace.server.reply import Offsets, Reply, step
from outpace.server.schema import Asked


class Strand:
    """State of one streamed choice."""

    def __init__(self, reply: Reply, index: int, seed: int, request: Asked) -> None:
        self.reply = reply
        self.index = index
        self.trace = bool(request.extension.trace)
        self.provisional = bool(request.extension.provisional)
        self.told = self.trace or self.provisional or request.usage
        self.seed = seed
        self.first = True
        self.offsets = Offsets(reply.model)
        self.steps: list[Any] = []
        self.texts: list[str] = []
        self.tokens = 0
        self.forwards = 0
        self.canvas: list[int] = []

    def chunks(self, event: Event) -> Iterator[str]:
        """Yield the chunks for an event: text, canvas, end."""
        scores = None
        if event.logprobs:
            scores = self.reply.scores(event.ids, event.logprobs, self.offsets)
        if self.trace:
            self.note(event)
        if event.text or scores:
            yield self.reply.chunk(
                self.index, event.text, logprobs=scores, outpace=self.extra(), first=self.first
            )
            self.first = False
        if self.provisional and (canvas := list(event.canvas)) != self.canvas:
            self.canvas = canvas
            extra = self.extra() if self.steps else None
            state = {"index": self.index, "canvas": self.shown(canvas)}
            yield self.reply.aside(outpace=state | (extra or {}))
        if event.output is not None:
            if self.first:  # an empty answer has a role, too
                yield self.reply.chunk(self.index, "", first=True)
            finish = event.output.finish_reason
            yield self.reply.chunk(self.index, None, finish=finish, outpace=self.extra(end=True))

    def note(self, event: Event) -> None:
        """Buffer steps and tokens until a chunk reports them."""
        self.steps += map(step, event.steps)
        self.texts += map(self.reply.model.token, event.ids)
        self.tokens += event.chosen
        self.forwards += sum(each.model == "target" for each in event.steps)

    def extra(self, end: bool = False) -> dict[str, Any] | None:
        """Return the extension fields of a chunk and clear the buffer."""
        if not self.trace:
            return {"index": self.index, "seed": self.seed} if end and not self.told else None
        if end and not self.steps:
            return None
        trace = {"steps": self.steps, "texts": self.texts}
        self.steps, self.texts = [], []
        return {"index": self.index, **trace, "tokens": self.tokens, "forwards": self.forwards}

    def shown(self, canvas: Sequence[int]) -> list[str | None]:
        """Return the texts of the canvas after the committed text; None for a hole."""
        return [None if token < 0 else self.reply.model.token(token) for token in canvas]


async def merged(answers: Sequence[PendingRequest]) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of all choices with the index of their choice."""
    if len(answers) == 1:  # no queue is needed
        async for event in answers[0]:
            yield 0, event
        return
    # With a slow reader, events accumulate in their request, which merges them into one.
    queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue(1)

    async def pump(index: int, answer: PendingRequest) -> None:
        try:
            async for event in answer:
                await queue.put((index, event))
        except Exception as error:
            await queue.put((index, error))

    pumps = [asyncio.ensure_future(pump(*each)) for each in enumerate(answers)]
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
