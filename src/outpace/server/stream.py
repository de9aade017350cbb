"""The choices of a streamed answer: events of the engine to events of the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from outpace.api.engine_client import PendingRequest
from outpace.api.output import Event
from outpace.server.reply import Offsets, Reply, step
from outpace.server.schema import Asked


class Strand:
    """What of a choice has been sent."""

    def __init__(self, reply: Reply, index: int, seed: int, asked: Asked) -> None:
        self.reply = reply
        self.index = index
        self.trace = bool(asked.extension.trace)
        self.provisional = bool(asked.extension.provisional)
        self.told = self.trace or self.provisional or asked.usage
        self.seed = seed
        self.first = True
        self.offsets = Offsets(reply.model)
        self.steps: list[Any] = []
        self.texts: list[str] = []
        self.tokens = 0
        self.forwards = 0
        self.canvas: list[int] = []

    def chunks(self, event: Event) -> Iterator[str]:
        """The chunk with the text of an event, what stands behind that, and the end."""
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
            told = self.extra() if self.steps else None
            shown = {"index": self.index, "canvas": self.shown(canvas)}
            yield self.reply.aside(outpace=shown | (told or {}))
        if event.output is not None:
            if self.first:  # an answer without text has a role all the same
                yield self.reply.chunk(self.index, "", first=True)
            finish = event.output.finish_reason
            yield self.reply.chunk(self.index, None, finish=finish, outpace=self.extra(end=True))

    def note(self, event: Event) -> None:
        """Keep the steps and tokens of an event until a chunk tells them."""
        self.steps += map(step, event.steps)
        self.texts += map(self.reply.model.token, event.ids)
        self.tokens += event.chosen
        self.forwards += sum(each.model == "target" for each in event.steps)

    def extra(self, end: bool = False) -> dict[str, Any] | None:
        """What a chunk says beside its text."""
        if not self.trace:
            return {"index": self.index, "seed": self.seed} if end and not self.told else None
        if end and not self.steps:
            return None
        told = {"steps": self.steps, "texts": self.texts}
        self.steps, self.texts = [], []
        return {"index": self.index, **told, "tokens": self.tokens, "forwards": self.forwards}

    def shown(self, canvas: Sequence[int]) -> list[str | None]:
        """What lies behind the committed text; None for a hole."""
        return [None if token < 0 else self.reply.model.token(token) for token in canvas]


async def merged(answers: Sequence[PendingRequest]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of all choices, with the number of their choice."""
    if len(answers) == 1:  # nothing stands between it and what is written
        async for event in answers[0]:
            yield 0, event
        return
    # Where nobody reads, what comes waits in its answer, which makes one event of it.
    queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue(1)

    async def pump(index: int, answer: PendingRequest) -> None:
        try:
            async for event in answer:
                await queue.put((index, event))
        except Exception as error:
            await queue.put((index, error))

    pumps = [asyncio.ensure_future(pump(*each)) for each in enumerate(answers)]
    try:
        left = len(pumps)
        while left:
            index, each = await queue.get()
            if isinstance(each, Exception):
                raise each
            left -= each.output is not None
            yield index, each
    finally:
        for task in pumps:
            task.cancel()
