"""The process that decodes for a server: requests come in, what becomes of them goes out."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from threading import Thread
from typing import Any, NamedTuple

import torch

from outpace.async_llm import AsyncAnswer, Draining, Event, QueueFull
from outpace.constraint.pattern import TooLarge
from outpace.decoding import Step
from outpace.engine.job import DecodingError
from outpace.engine.runner import Usage
from outpace.models.config import ModelConfig
from outpace.server.channel import Channel, get, put
from outpace.server.models import Choice, Model, load_all
from outpace.server.settings import Entry
from outpace.worker import SHARE, Worker, WorkerDied

PULSE = 0.1
"""Seconds between two signs of life."""

TELLING = SHARE / 3
"""Share of its time that the loop here spends on telling what is new at most; the other process has
about twice as much to do with it."""

FIELDS = attrgetter(*Step.__slots__)
"""A step as a tuple, which is pickled in an eighth of the time."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the other process wants: all models, the requests that wait for each, and whether the
    models are small, so that one thread decodes fastest."""

    models: Mapping[str, Entry]
    max_waiting: int
    small: bool


class Loaded(NamedTuple):
    """What a server must know of a model that is loaded elsewhere."""

    place: str
    config: ModelConfig
    methods: dict[str, Choice]
    method: str
    roles: dict[str, str]


class Pulse(NamedTuple):
    """A sign of life: when the step that runs began, and what ended the worker."""

    began: float
    error: str | None


Engines = dict[str, tuple[int, list[Usage]]]
"""Of each model, how many requests run and what its caches hold."""


class Asked(NamedTuple):
    """A request for a model."""

    number: int
    model: str
    prompt: Any
    options: dict[str, Any]


class Cancelled(NamedTuple):
    """Nobody waits for a request any more."""

    number: int


class Look(NamedTuple):
    """Somebody wants to know what there is."""


class News(NamedTuple):
    """What is new of a request: that it was let in where there is neither event nor error.

    `steps` are those since the news before, as tuples; neither `event` nor its output has them.
    """

    number: int
    event: Event | None = None
    steps: list[Any] = []
    error: BaseException | None = None
    cause: BaseException | None = None


class Notice(asyncio.Event):
    """What an answer sets when it has moved: its place in the next message."""

    def __init__(self, plant: Plant, number: int, answer: AsyncAnswer) -> None:
        super().__init__()
        self.plant = plant
        self.number = number
        self.answer = answer
        self.told = 0

    def set(self) -> None:
        """Be told with all others that move in this turn of the loop."""
        if not self.plant.moved:
            asyncio.get_running_loop().call_soon(self.plant.flush)
        self.plant.moved[self.number] = self

    def news(self) -> News | None:
        """What is new; None where it was told already."""
        try:
            event = self.answer.latest()
        except Exception as error:
            return failed(self.number, error)
        if event is None:
            return None
        steps, output = event.steps, event.output
        if output is not None:
            steps = output.steps[self.told :]
            output = replace(output, steps=[], speech=None)
        self.told += len(steps)
        event = replace(event, steps=(), output=output)
        return News(self.number, event, [*map(FIELDS, steps)])


KNOWN = (TooLarge, ValueError, QueueFull, Draining, DecodingError, WorkerDied)
"""Errors that keep their type. Any other may not be what its pickle says."""


def failed(number: int, error: BaseException) -> News:
    """An error, and its cause where that says what a client did."""
    cause = error.__cause__
    return News(number, error=plain(error), cause=plain(cause) if type(cause) is TooLarge else None)


def plain(error: BaseException) -> BaseException:
    """An error that can go to the other process; its traceback, which stays here, is a note."""
    kind = next((each for each in KNOWN if isinstance(error, each)), RuntimeError)
    told = kind(str(error) if kind is not RuntimeError else repr(error))
    if not isinstance(told, ValueError):
        told.add_note("".join(traceback.format_exception(error)))
    return told


class Plant:
    """The engines of a server, for another process."""

    def __init__(self, models: Mapping[str, Model], worker: Worker) -> None:
        self.models = models
        self.worker = worker
        self.hand: dict[int, AsyncAnswer | asyncio.Task[None]] = {}
        self.moved: dict[int, Notice] = {}
        self.channel = Channel(self.take, ended)

    async def run(self, own: socket.socket) -> None:
        """Decode until the other process ends, and this one with it."""
        await self.channel.join(own)
        while True:
            self.channel.send([self.pulse()])
            await asyncio.sleep(PULSE)

    def pulse(self) -> Pulse:
        """That all is well, or is not."""
        if self.worker.alive:
            return Pulse(self.worker.heartbeat, None)
        return Pulse(0.0, str(self.worker.error or "the worker was closed"))

    def engines(self) -> Engines:
        """What there is at the moment."""
        return {n: (m.engine.running, [*m.engine.usage]) for n, m in self.models.items()}

    def take(self, asked: Asked | Cancelled | Look) -> None:
        """Begin a request, end one, or show what there is."""
        match asked:
            case Asked(number=number):
                self.hand[number] = asyncio.ensure_future(self.begin(asked))
            case Cancelled(number=number):
                if (known := self.hand.pop(number, None)) is not None:
                    known.cancel()
            case Look():
                self.channel.send([self.engines()])

    async def begin(self, asked: Asked) -> None:
        """Let a request in, or say why not."""
        number = asked.number
        try:
            answer = await self.models[asked.model].engine.submit(asked.prompt, **asked.options)
        except Exception as error:
            self.hand.pop(number, None)
            self.channel.send([failed(number, error)])
            return
        assert isinstance(answer, AsyncAnswer)
        self.hand[number] = answer
        self.channel.send([News(number)])
        answer.news = Notice(self, number, answer)
        if answer.over:  # before it was there to be told
            answer.news.set()

    def flush(self) -> None:
        """Tell what has moved, in one message."""
        moved, self.moved = self.moved, {}
        here = (notice for number, notice in moved.items() if number in self.hand)
        told = [news for notice in here if (news := notice.news()) is not None]
        for news in told:
            if news.error is not None or news.event is not None and news.event.output is not None:
                del self.hand[news.number]
        if told:
            self.channel.send(told)


def ended() -> None:
    """End, since nobody waits any more."""
    os._exit(0)


def watch() -> None:
    """End with the other process, which holds the other end of standard input, whatever happens."""
    while os.read(0, 1):
        pass
    ended()


def main(descriptor: int) -> None:
    """Load what the other process wants, and decode for it until it ends."""
    Thread(target=watch, daemon=True).start()
    own = socket.socket(fileno=descriptor)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    order: Order = get(own)
    if order.small:
        torch.set_num_threads(1)  # before layouts are tried
    try:
        models, worker = load_all(order.models, order.max_waiting, TELLING)
    except ValueError as error:
        put(own, ValueError(str(error)))
        return
    put(own, {name: loaded(model) for name, model in models.items()})
    gc.collect()
    gc.freeze()  # a collection of all that was loaded would stop every stream
    asyncio.run(Plant(models, worker).run(own))


def loaded(model: Model) -> Loaded:
    """What the other process must know of a model."""
    return Loaded(model.engine.name, model.config, model.methods, model.method, model.roles)
