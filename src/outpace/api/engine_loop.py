"""The loop that owns engines: commands come in, events of their requests go out.

One thread runs it. It takes commands, steps each engine once, and sends what is new as one message.
Its `Connection` hides whether its clients are in this process or in another one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from outpace.api.llm import LLM
from outpace.api.output import Answer, Event
from outpace.constraint.compiler import Unread
from outpace.decoding import Step
from outpace.engine.stats import Stats

T = TypeVar("T")

SHARE = 0.01
"""Share of CPU time that notifications may take; events that come meanwhile are sent together. The
engine, the network and the client have as much to do with them again."""

LONGEST = 0.25
"""Most seconds between two notifications of events that can wait."""

POLL = 0.005
"""Seconds after which an idle loop looks whether a constraint has been read."""

MOST_UNREAD = 32
"""Requests that may wait until their constraints are read, since one may take a second."""

TURN = 1e-5
"""Switch interval while a constraint is read. An engine releases the interpreter's lock with every
operation, and would wait for it the usual 5 ms each time."""


class QueueFull(RuntimeError):
    """Too many requests are in hand."""


class ConnectionEnded(Exception):
    """No command can come any more."""


class Submit(NamedTuple):
    """A request for a model: token ids, or None for a cloze without a prompt, and options of `LLM`.

    `streams` asks for events before the last one, and `watched` for one after every forward, with
    the canvas.
    """

    number: int
    model: str
    prompt: list[int] | None
    streams: bool
    watched: bool
    options: dict[str, Any]


class Cancel(NamedTuple):
    """The end of a request, whose last event still comes where it was admitted."""

    number: int
    model: str


class Remove(NamedTuple):
    """The end of a model and of all its requests, which have no last event."""

    model: str


class Inspect(NamedTuple):
    """A question for what the engines hold."""


Command = Submit | Cancel | Remove | Inspect


class Progress(NamedTuple):
    """What is new of a request: that it was admitted where there is neither event nor error.

    `steps` are those since the progress before; neither `event` nor its output has them.
    """

    number: int
    event: Event | None = None
    steps: Sequence[Step] = ()
    error: BaseException | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing comes of the request any more."""
        return self.error is not None or self.event is not None and self.event.output is not None


Message = Progress | dict[str, Stats]

Charge = Callable[[float], None]
"""Receives the CPU seconds that a notification has cost."""


class Connection(Protocol):
    """What joins an engine loop to its clients."""

    def receive(self, seconds: float | None) -> Sequence[Command]:
        """Wait for commands, this many seconds at most. Raises `ConnectionEnded`."""

    def report(self, messages: Sequence[Message], charge: Charge | None) -> None:
        """Send messages, and `charge` what that costs other threads. Raises `ConnectionEnded`."""


class Budget:
    """Bounds the share of time that notifications take of any thread.

    Each is followed by a rest as long as `SHARE` wants, and no longer than `LONGEST`. Urgent events
    are sent in it, too, and neither cut nor prolong it.
    """

    def __init__(self) -> None:
        self.until = 0.0

    @property
    def is_due(self) -> bool:
        """Whether events that can wait may be sent."""
        return time.monotonic() >= self.until

    def charge(self, seconds: float) -> None:
        """Rest after a notification that has cost a thread so much; from any thread."""
        self.until = max(self.until, time.monotonic() + min(seconds / SHARE, LONGEST))


class ActiveRequest:
    """A request in an engine, and how many of its steps were sent."""

    def __init__(self, command: Submit, answer: Answer) -> None:
        answer.job.watched = command.watched
        self.number = command.number
        self.streams = command.streams or command.watched
        self.answer = answer
        self.sent = 0

    def has_progress(self, complete: bool) -> bool:
        """Whether to send something: its end, its first text, or, if `complete`, any token."""
        job, seen = self.answer.job, self.answer.seen
        if job.over or not self.streams:
            return job.over
        if job.watched:
            return len(job.request.trace) > seen.steps
        new = len(job.request) - len(job.request.prompt) > seen.tokens
        return new and (complete or not seen.tokens)

    def progress(self) -> Progress:
        """What is new; an answer that cannot be read ends with the error."""
        request = self.answer.job.request
        try:
            if self.streams:
                self.answer.push(request)
                self.answer.take()
            output = self.answer.output() if self.answer.job.over else None
        except Exception as error:
            return Progress(self.number, error=error)
        steps, self.sent = request.trace[self.sent :], len(request.trace)
        event = self.answer.event(output and replace(output, steps=[]))
        return Progress(self.number, replace(event, steps=()), steps)


class ServedModel:
    """A model of a loop, and its requests by their numbers."""

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self.llm = llm
        self.driver = llm.driver
        self.requests: dict[int, ActiveRequest] = {}

    def collect(self, complete: bool) -> list[Progress]:
        """What is new of its requests, alone with the engine; those that ended are forgotten."""
        found = [each.progress() for each in self.requests.values() if each.has_progress(complete)]
        for progress in found:
            if progress.is_last:
                ended = self.requests.pop(progress.number)
                if progress.error is not None:
                    self.llm.engine.cancel(ended.answer.job)  # which may go on
        return found

    def close(self) -> None:
        """Free what its requests hold."""
        for request in [*self.requests.values()]:
            self.driver.cancel(request.answer.job)


class EngineLoop:
    """Steps the engines of several models in turn, and waits where none has a request.

    Attributes:
        unread: requests whose constraints are read before they enter.
        messages: what is sent next.
        cost: CPU seconds that collecting these took; None where they are urgent.
        due: whether events that can wait are sent in this round, one decision for all models.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.models: dict[str, ServedModel] = {}
        self.unread: dict[int, tuple[Submit, Future[Answer]]] = {}
        self.reading = ThreadPoolExecutor(1, thread_name_prefix="outpace-constraints")
        self.budget = Budget()
        self.messages: list[Message] = []
        self.cost: float | None = None
        self.due = True

    def run(self) -> None:
        """Decode until an engine fails again and again. Raises `ConnectionEnded`."""
        while True:
            busy = any(model.requests for model in [*self.models.values()])
            self.receive(0 if busy else POLL if self.unread else None)
            self.due = self.budget.is_due
            for model in [*self.models.values()]:
                if model.requests:
                    turn = partial(self.turn, model)
                    drive = partial(model.driver.drive, turn, wait=True)
                    model.driver.go_on(model.name, drive)
            self.flush()

    def receive(self, seconds: float | None) -> None:
        """Admit requests whose constraints were read, and wait for commands."""
        for submit, read in [*self.unread.values()]:
            if read.done():
                del self.unread[submit.number]
                self.admit(submit, read)
        for command in self.connection.receive(seconds):
            match command:
                case Submit():
                    self.admit(command)
                case Cancel():
                    self.cancel(command)
                case Remove(model=name):
                    self.models.pop(name).close()
                case Inspect():
                    stats = {name: each.driver.stats for name, each in self.models.items()}
                    self.messages.append(stats)
        self.flush()

    def admit(self, submit: Submit, read: Future[Answer] | None = None) -> None:
        """Let a request in, or report why not; a new constraint is read by another thread first."""
        if (model := self.models.get(submit.model)) is None:
            return  # it was removed, and its requests have ended
        prepare = partial(model.llm.prepare, submit.prompt, **submit.options)
        try:
            answer = prepare(wait=False) if read is None else read.result()
            model.driver.submit(answer.job)
            model.requests[submit.number] = ActiveRequest(submit, answer)
            progress = Progress(submit.number)
        except Unread:
            if len(self.unread) < MOST_UNREAD:
                self.unread[submit.number] = submit, self.reading.submit(in_short_turns, prepare)
                return
            full = QueueFull(f"{MOST_UNREAD} constraints wait to be read")
            progress = Progress(submit.number, error=full)
        except Exception as error:
            progress = Progress(submit.number, error=error)
        self.messages.append(progress)

    def cancel(self, command: Cancel) -> None:
        """End a request before the next step, or before its constraint was read."""
        number, model = command.number, self.models.get(command.model)
        if model is not None and number in model.requests:
            model.driver.drop(model.requests[number].answer.job)
        elif number in self.unread:
            self.unread.pop(number)[1].cancel()

    def turn(self, model: ServedModel) -> bool:
        """Step an engine and collect its events, while no other thread drives it.

        Where nothing goes on, no event waits.
        """
        more = model.driver.advance()
        began = time.thread_time()
        complete = self.due or not more
        if progress := model.collect(complete):
            self.messages += progress
            if complete:
                self.cost = (self.cost or 0.0) + time.thread_time() - began
        return more

    def flush(self) -> None:
        """Send what is new as one message, since each one costs."""
        if self.messages:
            messages, self.messages = self.messages, []
            cost, self.cost = self.cost, None
            began = time.thread_time()
            self.connection.report(messages, None if cost is None else self.budget.charge)
            if cost is not None:
                self.budget.charge(cost + time.thread_time() - began)

    def close(self) -> None:
        """Free what requests hold, once it runs no more."""
        self.reading.shutdown(wait=False, cancel_futures=True)
        for model in self.models.values():
            model.close()


def in_short_turns(read: Callable[[], T]) -> T:
    """Read a constraint in a thread while another thread drives an engine."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    try:
        return read()
    finally:
        sys.setswitchinterval(usual)
