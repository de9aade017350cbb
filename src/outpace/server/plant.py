"""The process that decodes for a server: requests come in, what becomes of them goes out.

One thread hears what is asked, makes a step, and tells what is new, so that it never waits for
another. Prompts have become token ids before they get here.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from outpace.api.async_llm import MOST_UNREAD, Draining, QueueFull
from outpace.api.driver import Driver
from outpace.api.llm import LLM
from outpace.api.output import Answer, Event
from outpace.api.worker import LONGEST, SHARE, WorkerDied, in_turns
from outpace.constraint.compiler import Unread
from outpace.constraint.pattern import TooLarge
from outpace.decoding import Step
from outpace.engine.job import DecodingError
from outpace.engine.runner import Usage
from outpace.errors import ContextError, OptionError
from outpace.server.channel import Inbox, get, put
from outpace.server.logs import start_log
from outpace.server.models import load_all
from outpace.server.settings import Entry

PULSE = 0.1
"""Seconds after which word goes out though nothing is new, as a sign of life."""

GLANCE = 0.005
"""Seconds after which an engine that has nothing to do looks whether a constraint was read."""

MOST = 2**18
"""Bytes that are heard between two steps."""

FIELDS = attrgetter(*Step.__slots__)
"""A step as a tuple, which is pickled in an eighth of the time."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """All models that the other process wants; where they are small, one thread is fastest."""

    models: Mapping[str, Entry]
    small: bool
    verbose: bool = False


Engines = dict[str, tuple[int, list[Usage]]]
"""Of each model, how many requests run and what its caches hold."""


class Asked(NamedTuple):
    """A request for a model: token ids, or nothing in front of a cloze, and options of `LLM`.

    `streams` asks for word on the way, and `watched` for word of every forward, with the canvas.
    """

    number: int
    model: str
    prompt: list[int] | None
    streams: bool
    watched: bool
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

    @property
    def last(self) -> bool:
        """Whether nothing comes of the request any more."""
        return self.error is not None or self.event is not None and self.event.output is not None


class Following:
    """A request in the engine, and how much of it was told."""

    def __init__(self, asked: Asked, answer: Answer, driver: Driver) -> None:
        answer.job.watched = asked.watched
        driver.submit(answer.job)
        self.number = asked.number
        self.streams = asked.streams or asked.watched
        self.answer = answer
        self.driver = driver
        self.told = 0

    def cancel(self) -> None:
        """End it before the next step."""
        self.driver.drop(self.answer.job)

    def moved(self, all: bool) -> bool:
        """Whether there is something to tell: its end, its first text, or, of `all`, any."""
        job, seen = self.answer.job, self.answer.seen
        if job.over or not self.streams:
            return job.over
        if job.watched:
            return len(job.request.trace) > seen.steps
        new = len(job.request) - len(job.request.prompt) > seen.tokens
        return new and (all or not seen.tokens)

    def news(self) -> News:
        """What is new."""
        request = self.answer.job.request
        try:
            if self.streams:
                self.answer.push(request)
                self.answer.take()
            output = self.answer.output() if self.answer.job.over else None
        except Exception as error:
            self.cancel()
            return failed(self.number, error)
        steps, self.told = request.trace[self.told :], len(request.trace)
        event = self.answer.event(output and replace(output, steps=[], speech=None))
        return News(self.number, replace(event, steps=()), [*map(FIELDS, steps)])


KNOWN = (TooLarge, ValueError, QueueFull, Draining, DecodingError, WorkerDied)
"""Errors that keep their type. Any other may not be what its pickle says."""


def failed(number: int, error: BaseException) -> News:
    """An error, and its cause where that says what a client did."""
    cause = error.__cause__
    return News(number, error=plain(error), cause=plain(cause) if type(cause) is TooLarge else None)


def plain(error: BaseException) -> BaseException:
    """An error that can go to the other process; its traceback, which stays here, is a note."""
    if isinstance(error, OptionError):
        named = ContextError if isinstance(error, ContextError) else OptionError
        return named(error.param, None, str(error))
    kind = next((each for each in KNOWN if isinstance(error, each)), RuntimeError)
    told = kind(str(error) if kind is not RuntimeError else repr(error))
    if not isinstance(told, ValueError):
        told.add_note("".join(traceback.format_exception(error)))
    return told


class Plant:
    """The engines of a server, for another process.

    Attributes:
        hand: requests in the engines, by their numbers.
        unread: those whose constraints are read before they enter.
        spoke, quiet: when anything was told, and until when only that is which cannot wait;
            readings of `time.monotonic`.
    """

    def __init__(self, models: Mapping[str, LLM], own: socket.socket) -> None:
        self.models = models
        self.socket = own
        self.inbox = Inbox()
        self.hand: dict[int, Following] = {}
        self.unread: dict[int, tuple[Asked, Future[Answer]]] = {}
        self.reading = ThreadPoolExecutor(1, thread_name_prefix="outpace-constraints")
        self.spoke = self.quiet = 0.0

    def run(self) -> None:
        """Decode until the other process ends, or an engine fails again and again."""
        drivers = {name: llm.driver for name, llm in self.models.items()}
        busy: list[bool] = []
        while True:
            self.hear(0 if any(busy) else GLANCE if self.unread else PULSE)
            busy = [each.go_on(name, each.step) for name, each in drivers.items()]
            self.tell(all=not any(busy))

    def hear(self, seconds: float) -> None:
        """Do what is asked, and wait for something for so long at most; `EOFError` at the end."""
        told: list[Any] = []
        for number, (asked, read) in [*self.unread.items()]:
            if read.done():
                del self.unread[number]
                told.append(self.begin(asked, read))
        if select.select([self.socket], [], [], seconds)[0]:
            if not (data := self.socket.recv(MOST)):
                raise EOFError("the other side has ended")
            told += [self.take(asked) for asked in self.inbox.take(data)]
        if told := [each for each in told if each is not None]:
            self.send(told)

    def take(self, asked: Asked | Cancelled | Look) -> News | Engines | None:
        """Begin a request, end one, or show what there is."""
        match asked:
            case Asked():
                return self.begin(asked)
            case Cancelled(number=number):
                if number in self.hand:
                    self.hand.pop(number).cancel()
                elif number in self.unread:
                    self.unread.pop(number)[1].cancel()
            case Look():
                return {
                    name: (len(llm.engine.running), [each.usage for each in llm.engine.runners])
                    for name, llm in self.models.items()
                }
        return None

    def begin(self, asked: Asked, read: Future[Answer] | None = None) -> News | None:
        """Let a request in, or say why not; first another thread has `read` a new constraint."""
        llm = self.models[asked.model]
        prepare = partial(llm.prepare, asked.prompt, **asked.options)
        try:
            answer = prepare(wait=False) if read is None else read.result()
        except Unread:
            if len(self.unread) >= MOST_UNREAD:
                full = QueueFull(f"{MOST_UNREAD} constraints wait to be read")
                return failed(asked.number, full)
            self.unread[asked.number] = asked, self.reading.submit(in_turns, prepare)
            return None
        except Exception as error:
            return failed(asked.number, error)
        self.hand[asked.number] = Following(asked, answer, llm.driver)
        return News(asked.number)

    def tell(self, *, all: bool) -> None:
        """Tell what cannot wait; all where nothing goes on, and otherwise as often as it may cost.

        It is one message, since each one costs.
        """
        now, began = time.monotonic(), time.thread_time()
        all = all or now >= self.quiet
        told = [each.news() for each in self.hand.values() if each.moved(all)]
        for news in told:
            if news.last:
                del self.hand[news.number]
        if told or now > self.spoke + PULSE:
            self.send(told)
        if told and all:
            self.quiet = now + min((time.thread_time() - began) / SHARE, LONGEST)

    def send(self, told: Sequence[News | Engines]) -> None:
        """Send a message, which waits while the other process takes none."""
        put(self.socket, told)
        self.spoke = time.monotonic()


def main(descriptor: int) -> None:
    """Load what the other process wants, and decode for it until it ends."""
    own = socket.socket(fileno=descriptor)
    order: Order = get(own)
    start_log(verbose=order.verbose)
    if order.small:
        torch.set_num_threads(1)  # before layouts are tried
    try:
        models = load_all(order.models)
    except ValueError as error:
        put(own, plain(error))
        return
    put(own, {name: known for name, (_, known) in models.items()})
    gc.collect()
    gc.freeze()  # a collection of all that was loaded would stop every stream
    try:
        Plant({name: llm for name, (llm, _) in models.items()}, own).run()
    except (ConnectionError, EOFError):
        os._exit(0)  # since nobody waits any more
