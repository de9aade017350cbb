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
from outpace.api.output import Event
from outpace.api.pending_answer import PendingAnswer
from outpace.constraint.compiler import NotCompiledError
from outpace.decoding import Step
from outpace.engine.stats import Stats

T = TypeVar("T")

MAX_NOTIFICATION_SHARE = 0.01
"""Maximum share of CPU time spent on notifications; other events are sent together.

The engine, the network and the client each spend about as much on them again.
"""

MAX_NOTIFICATION_DELAY = 0.25
"""Maximum number of seconds between two notifications of events that are not urgent."""

COMPILER_POLL_SECONDS = 0.005
"""Seconds between checks of an idle loop whether a constraint has been compiled."""

MAX_COMPILING_REQUESTS = 32
"""Maximum number of requests whose constraints are compiling; one may take a second."""

COMPILER_SWITCH_INTERVAL = 1e-5
"""Interpreter switch interval while a constraint compiles.

An engine releases the GIL in every operation, and would wait the default 5 ms for it each time.
"""


class QueueFullError(RuntimeError):
    """Too many requests are in flight."""


class ConnectionEndedError(Exception):
    """No more commands can arrive."""


class SubmitCommand(NamedTuple):
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


class CancelCommand(NamedTuple):
    """Command to cancel a request; if it was admitted, its last event is still sent."""

    number: int
    model: str


class RemoveCommand(NamedTuple):
    """Command to remove a model and all its requests, without a last event."""

    model: str


class InspectCommand(NamedTuple):
    """Command to send the statistics of all engines."""


EngineCommand = SubmitCommand | CancelCommand | RemoveCommand | InspectCommand


class RequestProgress(NamedTuple):
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


EngineMessage = RequestProgress | dict[str, Stats]

ChargeCallback = Callable[[float], None]
"""Receives the CPU seconds that a notification has cost."""


class CommandConnection(Protocol):
    """Connection of an engine loop to its clients."""

    def receive_commands(self, seconds: float | None) -> Sequence[EngineCommand]:
        """Wait up to `seconds` for commands. Raises `ConnectionEndedError`."""

    def send_messages(
        self, messages: Sequence[EngineMessage], charge: ChargeCallback | None
    ) -> None:
        """Send messages, and `charge` their cost elsewhere; raises `ConnectionEndedError`."""


class NotificationBudget:
    """Limits the share of time that notifications take in any thread.

    After each notification, events wait until its cost is below `MAX_NOTIFICATION_SHARE`, at most
    `MAX_NOTIFICATION_DELAY` seconds. Urgent events are sent at once and do not change the wait.
    """

    def __init__(self) -> None:
        self.resumes_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether events that are not urgent may be sent."""
        return time.monotonic() >= self.resumes_at

    def add_cost(self, seconds: float) -> None:
        """Add the cost of a notification in seconds of one thread, from any thread."""
        self.resumes_at = max(
            self.resumes_at,
            time.monotonic() + min(seconds / MAX_NOTIFICATION_SHARE, MAX_NOTIFICATION_DELAY),
        )


class ActiveRequest:
    """A request in an engine, and the number of its steps that were sent."""

    def __init__(self, command: SubmitCommand, answer: PendingAnswer) -> None:
        answer.job.notify_always = command.watched
        self.number = command.number
        self.streams = command.streams or command.watched
        self.answer = answer
        self.steps_sent = 0

    def has_progress(self, complete: bool) -> bool:
        """Return whether its end, first text or, if `complete`, any new token is to be sent."""
        job, last = self.answer.job, self.answer.last_sent
        if job.is_finished or not self.streams:
            return job.is_finished
        if job.notify_always:
            return len(job.request.trace) > last.steps
        has_new = len(job.request) - len(job.request.prompt) > last.tokens
        return has_new and (complete or not last.tokens)

    def collect_progress(self) -> RequestProgress:
        """Return the progress since the last call, or the error of decoding its text."""
        request = self.answer.job.request
        try:
            if self.streams:
                self.answer.decode_tokens(request)
                self.answer.append_piece()
            output = self.answer.build_output() if self.answer.job.is_finished else None
        except Exception as error:
            return RequestProgress(self.number, error=error)
        steps, self.steps_sent = request.trace[self.steps_sent :], len(request.trace)
        event = self.answer.take_event(output and replace(output, steps=[]))
        return RequestProgress(self.number, replace(event, steps=()), steps)


class ServedModel:
    """A model of the loop, and its requests by number."""

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self.llm = llm
        self.driver = llm.driver
        self.requests: dict[int, ActiveRequest] = {}

    def collect_progress(self, complete: bool) -> list[RequestProgress]:
        """Collect progress with exclusive access to the engine, and drop ended requests."""
        found = [
            each.collect_progress()
            for each in self.requests.values()
            if each.has_progress(complete)
        ]
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

    def __init__(self, connection: CommandConnection) -> None:
        self.connection = connection
        self.models: dict[str, ServedModel] = {}
        self.compiling: dict[int, tuple[SubmitCommand, Future[PendingAnswer]]] = {}
        self.compiler_executor = ThreadPoolExecutor(1, thread_name_prefix="outpace-constraints")
        self.notification_budget = NotificationBudget()
        self.outgoing: list[EngineMessage] = []
        self.collection_cost: float | None = None
        self.is_due = True

    def run(self) -> None:
        """Run until a step fails repeatedly. Raises `ConnectionEndedError`."""
        while True:
            busy = any(model.requests for model in [*self.models.values()])
            self.process_commands(0 if busy else COMPILER_POLL_SECONDS if self.compiling else None)
            self.is_due = self.notification_budget.is_due
            for model in [*self.models.values()]:
                if model.requests:
                    step = partial(
                        model.driver.run_exclusively, partial(self.step_model, model), wait=True
                    )
                    model.driver.attempt_step(model.name, step)
            self.flush_messages()

    def process_commands(self, seconds: float | None) -> None:
        """Admit requests with compiled constraints, then wait for commands and process them."""
        for submit, future in [*self.compiling.values()]:
            if future.done():
                del self.compiling[submit.number]
                self.admit_request(submit, future)
        for command in self.connection.receive_commands(seconds):
            match command:
                case SubmitCommand():
                    self.admit_request(command)
                case CancelCommand():
                    self.cancel_request(command)
                case RemoveCommand(model=name):
                    self.models.pop(name).close()
                case InspectCommand():
                    stats = {name: each.driver.stats for name, each in self.models.items()}
                    self.outgoing.append(stats)
        self.flush_messages()

    def admit_request(
        self, submit: SubmitCommand, future: Future[PendingAnswer] | None = None
    ) -> None:
        """Admit a request or report its error; another thread compiles a new constraint first."""
        if (model := self.models.get(submit.model)) is None:
            return  # the model was removed, and its requests have ended
        prepare = partial(model.llm.prepare, submit.prompt, **submit.options)
        try:
            answer = prepare(wait=False) if future is None else future.result()
            model.driver.submit(answer.job)
            model.requests[submit.number] = ActiveRequest(submit, answer)
            progress = RequestProgress(submit.number)
        except NotCompiledError:
            if len(self.compiling) < MAX_COMPILING_REQUESTS:
                self.compiling[submit.number] = (
                    submit,
                    self.compiler_executor.submit(compile_in_background, prepare),
                )
                return
            full = QueueFullError(
                f"already {MAX_COMPILING_REQUESTS} constraints wait to be compiled; try again later"
            )
            progress = RequestProgress(submit.number, error=full)
        except Exception as error:
            progress = RequestProgress(submit.number, error=error)
        self.outgoing.append(progress)

    def cancel_request(self, command: CancelCommand) -> None:
        """Cancel a request before the next step, or before its constraint is compiled."""
        number, model = command.number, self.models.get(command.model)
        if model is not None and number in model.requests:
            model.driver.cancel_later(model.requests[number].answer.job)
        elif number in self.compiling:
            self.compiling.pop(number)[1].cancel()

    def step_model(self, model: ServedModel) -> bool:
        """Step an engine and collect its events, all of them if no request is left."""
        more = model.driver.process_and_step()
        began = time.thread_time()
        complete = self.is_due or not more
        if progress := model.collect_progress(complete):
            self.outgoing += progress
            if complete:
                self.collection_cost = (self.collection_cost or 0.0) + time.thread_time() - began
        return more

    def flush_messages(self) -> None:
        """Send all outgoing messages as one, since each send has a cost."""
        if self.outgoing:
            messages, self.outgoing = self.outgoing, []
            cost, self.collection_cost = self.collection_cost, None
            began = time.thread_time()
            self.connection.send_messages(
                messages, None if cost is None else self.notification_budget.add_cost
            )
            if cost is not None:
                self.notification_budget.add_cost(cost + time.thread_time() - began)

    def close(self) -> None:
        """Free the memory of all requests after `run` has ended."""
        self.compiler_executor.shutdown(wait=False, cancel_futures=True)
        for model in self.models.values():
            model.close()


def compile_in_background(prepare: Callable[[], T]) -> T:
    """Compile a constraint in this thread while another thread drives an engine."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(COMPILER_SWITCH_INTERVAL)
    try:
        return prepare()
    finally:
        sys.setswitchinterval(interval)
