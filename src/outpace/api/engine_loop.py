"""Loop that owns engines: it receives commands, and sends the events of their requests.

One thread runs it. Each round receives commands, steps every engine once, and sends all progress as
one message. Its `CommandConnection` hides whether the clients are in this process or another.
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
"""Maximum share of CPU time spent on notifications; other events are sent together.

The engine, the network and the client each spend about as much on them again.
"""

LONGEST = 0.25
"""Maximum number of seconds between two notifications of events that are not urgent."""

POLL = 0.005
"""Seconds between checks of an idle loop whether a constraint has been compiled."""

MOST_UNREAD = 32
"""Maximum number of requests whose constraints are compiling; one may take a second."""

TURN = 1e-5
"""Interpreter switch interval while a constraint compiles.

An engine releases the GIL in every operation, and would wait the default 5 ms for it each time.
"""


class QueueFull(RuntimeError):
    """Too many requests are in flight."""


class ConnectionEnded(Exception):
    """No more commands can arrive."""


class Submit(NamedTuple):
    """Command to run a request.

    Attributes:
        number: Number of the request.
        model: Name of the model.
        prompt: Token ids, or None for an infill template without a prompt.
        streams: Whether to send events before the last one.
        watched: Whether to send an event with the canvas after every forward.
        options: Options of the request by name.
    """

    number: int
    model: str
    prompt: list[int] | None
    streams: bool
    watched: bool
    options: dict[str, Any]


class Cancel(NamedTuple):
    """Command to cancel a request; if it was admitted, its last event is still sent."""

    number: int
    model: str


class Remove(NamedTuple):
    """Command to remove a model and all its requests, without a last event."""

    model: str


class Inspect(NamedTuple):
    """Command to send the statistics of all engines."""


Command = Submit | Cancel | Remove | Inspect


class Progress(NamedTuple):
    """Progress of a request; without event and error, it was admitted.

    Attributes:
        number: Number of the request.
        event: New event, without its steps.
        steps: Steps since the previous progress.
        error: Error that ended the request.
    """

    number: int
    event: Event | None = None
    steps: Sequence[Step] = ()
    error: BaseException | None = None

    @property
    def is_last(self) -> bool:
        """Whether no more progress follows."""
        return self.error is not None or self.event is not None and self.event.output is not None


Message = Progress | dict[str, Stats]

Charge = Callable[[float], None]
"""Receives the CPU seconds that a notification has cost."""


class Connection(Protocol):
    """Connection of an engine loop to its clients."""

    def receive(self, seconds: float | None) -> Sequence[Command]:
        """Wait up to `seconds` for commands. Raises `ConnectionEndedError`."""

    def report(self, messages: Sequence[Message], charge: Charge | None) -> None:
        """Send messages, and `charge` their cost elsewhere; raises `ConnectionEndedError`."""


class Budget:
    """Limits the share of time that notifications take in any thread.

    After each notification, events wait until its cost is below `MAX_NOTIFICATION_SHARE`, at most
    `MAX_NOTIFICATION_DELAY` seconds. Urgent events are sent at once and do not change the wait.
    """

    def __init__(self) -> None:
        self.until = 0.0

    @property
    def is_due(self) -> bool:
        """Whether events that are not urgent may be sent."""
        return time.monotonic() >= self.until

    def charge(self, seconds: float) -> None:
        """Add the cost of a notification in seconds of one thread, from any thread."""
        self.until = max(self.until, time.monotonic() + min(seconds / SHARE, LONGEST))


class ActiveRequest:
    """A request in an engine, and the number of its steps that were sent."""

    def __init__(self, command: Submit, answer: Answer) -> None:
        answer.job.watched = command.watched
        self.number = command.number
        self.streams = command.streams or command.watched
        self.answer = answer
        self.sent = 0

    def has_progress(self, complete: bool) -> bool:
        """Return whether its end, first text or, if `complete`, any new token is to be sent."""
        job, last = self.answer.job, self.answer.seen
        if job.over or not self.streams:
            return job.over
        if job.watched:
            return len(job.request.trace) > last.steps
        has_new = len(job.request) - len(job.request.prompt) > last.tokens
        return has_new and (complete or not last.tokens)

    def progress(self) -> Progress:
        """Return the progress since the last call, or the error of decoding its text."""
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
    """A model of the loop, and its requests by number."""

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self.llm = llm
        self.driver = llm.driver
        self.requests: dict[int, ActiveRequest] = {}

    def collect(self, complete: bool) -> list[Progress]:
        """Collect progress with exclusive access to the engine, and drop ended requests."""
        found = [each.progress() for each in self.requests.values() if each.has_progress(complete)]
        for progress in found:
            if progress.is_last:
                ended = self.requests.pop(progress.number)
                if progress.error is not None:
                    self.llm.engine.cancel(ended.answer.job)  # it may still be running
        return found

    def close(self) -> None:
        """Free the memory of its requests."""
        for request in [*self.requests.values()]:
            self.driver.cancel(request.answer.job)


class EngineLoop:
    """Steps the engines of several models, and waits while none has a request.

    Attributes:
        compiling: Requests whose constraints are compiling.
        outgoing: Messages to send next.
        collection_cost: CPU seconds spent on collecting them; None if they are urgent.
        is_due: Whether this round sends events that are not urgent, decided once for all models.
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
        """Run until a step fails repeatedly. Raises `ConnectionEndedError`."""
        while True:
            busy = any(model.requests for model in [*self.models.values()])
            self.receive(0 if busy else POLL if self.unread else None)
            self.due = self.budget.is_due
            for model in [*self.models.values()]:
                if model.requests:
                    step = partial(model.driver.drive, partial(self.turn, model), wait=True)
                    model.driver.go_on(model.name, step)
            self.flush()

    def receive(self, seconds: float | None) -> None:
        """Admit requests with compiled constraints, then wait for commands and process them."""
        for submit, future in [*self.unread.values()]:
            if future.done():
                del self.unread[submit.number]
                self.admit(submit, future)
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

    def admit(self, submit: Submit, future: Future[Answer] | None = None) -> None:
        """Admit a request or report its error; another thread compiles a new constraint first."""
        if (model := self.models.get(submit.model)) is None:
            return  # the model was removed, and its requests have ended
        prepare = partial(model.llm.prepare, submit.prompt, **submit.options)
        try:
            answer = prepare(wait=False) if future is None else future.result()
            model.driver.submit(answer.job)
            model.requests[submit.number] = ActiveRequest(submit, answer)
            progress = Progress(submit.number)
        except Unread:
            if len(self.unread) < MOST_UNREAD:
                self.unread[submit.number] = submit, self.reading.submit(in_short_turns, prepare)
                return
            full = QueueFull(
                f"already {MOST_UNREAD} constraints wait to be compiled; try again later"
            )
            progress = Progress(submit.number, error=full)
        except Exception as error:
            progress = Progress(submit.number, error=error)
        self.messages.append(progress)

    def cancel(self, command: Cancel) -> None:
        """Cancel a request before the next step, or before its constraint is compiled."""
        number, model = command.number, self.models.get(command.model)
        if model is not None and number in model.requests:
            model.driver.drop(model.requests[number].answer.job)
        elif number in self.unread:
            self.unread.pop(number)[1].cancel()

    def turn(self, model: ServedModel) -> bool:
        """Step an engine and collect its events, all of them if no request is left."""
        more = model.driver.advance()
        began = time.thread_time()
        complete = self.due or not more
        if progress := model.collect(complete):
            self.messages += progress
            if complete:
                self.cost = (self.cost or 0.0) + time.thread_time() - began
        return more

    def flush(self) -> None:
        """Send all outgoing messages as one, since each send has a cost."""
        if self.messages:
            messages, self.messages = self.messages, []
            cost, self.cost = self.cost, None
            began = time.thread_time()
            self.connection.report(messages, None if cost is None else self.budget.charge)
            if cost is not None:
                self.budget.charge(cost + time.thread_time() - began)

    def close(self) -> None:
        """Free the memory of all requests after `run` has ended."""
        self.reading.shutdown(wait=False, cancel_futures=True)
        for model in self.models.values():
            model.close()


def in_short_turns(prepare: Callable[[], T]) -> T:
    """Compile a constraint in this thread while another thread drives an engine."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    try:
        return prepare()
    finally:
        sys.setswitchinterval(interval)
