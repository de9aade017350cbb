"""Loop that owns engines: it receives commands, and sends the events of their requests.

One thread runs it. Each round receives commands, steps every engine once, and sends all progress as
one message. Its `CommandConnection` hides whether the clients are in this process or another.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock, Thread
from typing import TypeVar

import torch

from outpace.api.engine_client import (
    CancelCommand,
    CommandConnection,
    EngineMessage,
    InspectCommand,
    LoadError,
    QueueFullError,
    RemoveCommand,
    SubmitCommand,
)
from outpace.api.llm import LLM
from outpace.api.output import Event
from outpace.api.pending_answer import PendingAnswer
from outpace.constraint.compiler import NotCompiledError
from outpace.constraint.dfa import PAUSE
from outpace.engine.memory import available_bytes, release_memory, trim_heap

T = TypeVar("T")

SWITCH_INTERVAL = 1e-5
"""Interpreter switch interval during background work.

An engine releases the GIL in every operation, and would wait the default 5 ms for it each time.
"""


WORK_SECONDS = 0.005
"""Seconds of a compilation between two pauses of the same length while an engine has requests."""


class Pauser:
    """Lets a compilation use half of the time of its thread, since each holds the GIL in turn.

    Args:
        is_busy: Whether an engine has requests.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self.is_busy = is_busy
        self.resumed = time.monotonic()

    def pause(self) -> None:
        """Wait if the thread has worked long enough."""
        worked = time.monotonic() - self.resumed
        if worked > WORK_SECONDS:
            if self.is_busy():
                time.sleep(worked)
            self.resumed = time.monotonic()


class BackgroundWork:
    """Runs functions in any number of threads without delaying the thread of the engines.

    Args:
        is_busy: Whether an engine has requests.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self.is_busy = is_busy
        self.lock = Lock()
        self.running = 0
        self.usual_interval = sys.getswitchinterval()

    def run(self, work: Callable[[], T]) -> T:
        """Run a function in this thread, and return its result."""
        self.count_running(1)
        token = PAUSE.set(Pauser(self.is_busy).pause)
        try:
            return work()
        finally:
            PAUSE.reset(token)
            trim_heap()  # a compilation may use a GiB for some seconds
            self.count_running(-1)

    def count_running(self, change: int) -> None:
        """Shorten the switch interval before the first function, and restore it after the last."""
        with self.lock:
            if not self.running:
                self.usual_interval = sys.getswitchinterval()
            self.running += change
            sys.setswitchinterval(SWITCH_INTERVAL if self.running else self.usual_interval)


class ServedModel:
    """A model of the loop, and its requests by number."""

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self.llm = llm
        self.driver = llm.driver
        self.requests: dict[int, PendingAnswer] = {}

    def take_events(self, complete: bool) -> list[Event]:
        """Collect events with exclusive access to the engine, and drop ended requests."""
        events = [each.take_event() for each in self.requests.values() if each.has_event(complete)]
        for event in events:
            if event.is_last:
                ended = self.requests.pop(event.number)
                if event.error is not None:
                    self.llm.engine.cancel(ended)  # it may still be running
        return events

    def close(self) -> None:
        """Free the memory of its requests."""
        for request in [*self.requests.values()]:
            self.driver.cancel(request)


LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LazyModel:
    """A model that is loaded when it is requested.

    Attributes:
        load: Function that loads it.
        keep_seconds: Seconds without requests after which it is unloaded.
        device: Device that it uses.
        weight_bytes: Memory of its weights.
        cache_bytes: Memory of its caches once they are full.
    """

    load: Callable[[], LLM]
    keep_seconds: float
    device: torch.device
    weight_bytes: int
    cache_bytes: int

    @property
    def is_short(self) -> bool:
        """Whether the available memory may not be enough for weights and caches."""
        available = available_bytes(self.device)
        return available is not None and available < self.weight_bytes + self.cache_bytes

    def load_checked(self) -> LLM:
        """Load it; raises `LoadError` if the weights exceed the available memory."""
        available = available_bytes(self.device)
        if available is not None and available < self.weight_bytes:
            needed, rest = (f"{size / 2**30:.2f} GiB" for size in (self.weight_bytes, available))
            raise LoadError(f"its weights need {needed} of memory, and {rest} are available")
        return self.load()


class ModelLoader:
    """Loads models in another thread, one at a time, while the loop drives the loaded ones.

    If memory is short, the model that has been idle longest is unloaded first. Models with requests
    stay loaded: the load waits for them, and their new requests wait for the load.

    Args:
        served: The loaded models of the loop, to which it adds and from which it removes.
        background: Work beside the thread of the loop.

    Attributes:
        models: All models that are loaded when they are requested.
        waiting: Held requests of each model, in order of arrival.
        loading: Model that is being loaded.
        last_used: Time at which each loaded one of `models` was last in use.
        needs_memory: Whether a load waits until a model has no more requests.
    """

    def __init__(self, served: dict[str, ServedModel], background: BackgroundWork) -> None:
        self.served, self.background = served, background
        self.models: dict[str, LazyModel] = {}
        self.waiting: dict[str, dict[int, SubmitCommand]] = {}
        self.loading: tuple[str, Future[LLM]] | None = None
        self.last_used: dict[str, float] = {}
        self.needs_memory = False

    def hold(self, submit: SubmitCommand) -> bool:
        """Hold a request whose model must be loaded first; returns whether it does."""
        name = submit.model
        if name not in self.models or (name in self.served and not self.needs_memory):
            return False
        self.waiting.setdefault(name, {})[submit.number] = submit
        return True

    def cancel(self, command: CancelCommand) -> None:
        """Drop a held request; a load that has begun continues."""
        held = self.waiting.get(command.model, {})
        held.pop(command.number, None)
        if not held and (self.loading is None or self.loading[0] != command.model):
            self.waiting.pop(command.model, None)

    def take_ready(self) -> Iterator[tuple[SubmitCommand, LoadError | None]]:
        """Yield the held requests whose model is loaded, or the error of its load."""
        if self.loading is not None and self.loading[1].done():
            (name, future), self.loading = self.loading, None
            failure = self.finish_load(name, future)
            del future  # it holds the model
            if failure is not None:
                for submit in self.waiting.pop(name).values():
                    yield submit, LoadError(failure)
        if not self.needs_memory:
            for name in [name for name in self.waiting if name in self.served]:
                yield from ((submit, None) for submit in self.waiting.pop(name).values())

    def finish_load(self, name: str, future: Future[LLM]) -> str | None:
        """Serve a model whose load has ended, or return the message of its error."""
        if (error := future.exception()) is not None:
            return describe_failure(name, error)
        self.served[name] = ServedModel(name, future.result())
        self.last_used[name] = time.monotonic()
        return None

    def update(self, in_use: Collection[str]) -> None:
        """Unload idle models, and begin the next load.

        Args:
            in_use: Names of the loaded models that have requests.
        """
        now = time.monotonic()
        for name in [*self.last_used]:
            if name in in_use:
                self.last_used[name] = now
            elif now >= self.unload_time(name):
                self.unload(name, f"idle for {self.models[name].keep_seconds:g} s")
        if self.loading is None:
            wanted = next((name for name in self.waiting if name not in self.served), None)
            self.needs_memory = wanted is not None and not self.begin_load(wanted, in_use)

    def begin_load(self, name: str, in_use: Collection[str]) -> bool:
        """Begin a load; returns False if it must wait for the memory of models in use."""
        model = self.models[name]
        rivals = [each for each in self.last_used if self.models[each].device == model.device]
        idle = sorted((n for n in rivals if n not in in_use), key=self.last_used.__getitem__)
        while (is_short := model.is_short) and idle:
            self.unload(idle.pop(0), f"{name} needs memory")
        if is_short and any(each in in_use for each in rivals):
            return False
        self.loading = name, Future()
        work = partial(self.background.run, model.load_checked)
        Thread(
            target=complete_future,
            args=(self.loading[1], work),
            name="outpace-loading",
            daemon=True,  # the process may end during a load
        ).start()
        return True

    def unload(self, name: str, reason: str) -> None:
        """Unload a model without requests, and free its memory."""
        LOG.info("unloading %s: %s", name, reason)
        del self.last_used[name]
        self.served.pop(name).close()
        release_memory()

    def unload_time(self, name: str) -> float:
        """Return the time at which a loaded model is unloaded if no request arrives."""
        return self.last_used[name] + self.models[name].keep_seconds


def complete_future(future: Future[LLM], work: Callable[[], LLM]) -> None:
    """Run a function, and set its result or its error as that of the future."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def describe_failure(name: str, error: BaseException) -> str:
    """Log the error of a load, and return its message for the requests that waited."""
    if isinstance(error, ValueError | LoadError):
        LOG.error("%s cannot be loaded: %s", name, error)
        return f"{name} cannot be loaded: {error}"
    LOG.error("%s cannot be loaded", name, exc_info=error)
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{name} cannot be loaded: {reason or type(error).__name__}; see the log"


MAX_NOTIFICATION_SHARE = 0.01
"""Maximum share of CPU time spent on notifications; other events are sent together.

The engine, the network and the client each spend about as much on them again.
"""

MAX_NOTIFICATION_DELAY = 0.25
"""Maximum number of seconds between two notifications of events that are not urgent."""

BACKGROUND_POLL_SECONDS = 0.005
"""Seconds between checks of an idle loop whether a constraint is compiled, or a model loaded."""

MAX_COMPILING_REQUESTS = 32
"""Maximum number of requests whose constraints are compiling; one may take a second."""


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


class EngineLoop:
    """Steps the engines of several models, and waits while none has a request.

    Attributes:
        models: Loaded models by name.
        loader: Loads and unloads further models.
        compiling: Requests whose constraints are compiling.
        outgoing: Messages to send next.
        collection_cost: CPU seconds spent on collecting them; None if they are urgent.
        is_due: Whether this round sends events that are not urgent, decided once for all models.
    """

    def __init__(self, connection: CommandConnection) -> None:
        self.connection = connection
        self.models: dict[str, ServedModel] = {}
        self.background = BackgroundWork(lambda: self.is_busy)
        self.loader = ModelLoader(self.models, self.background)
        self.compiling: dict[int, tuple[SubmitCommand, Future[PendingAnswer]]] = {}
        self.compiler_executor = ThreadPoolExecutor(1, thread_name_prefix="outpace-constraints")
        self.notification_budget = NotificationBudget()
        self.outgoing: list[EngineMessage] = []
        self.collection_cost: float | None = None
        self.is_due = True

    def add_model(self, name: str, model: LLM | LazyModel) -> None:
        """Serve a model, or load it when it is requested."""
        if isinstance(model, LazyModel):
            self.loader.models[name] = model
        else:
            self.models[name] = ServedModel(name, model)

    def run(self) -> None:
        """Run until a step fails repeatedly. Raises `ConnectionEndedError`."""
        while True:
            self.process_commands(self.wait_seconds)
            self.is_due = self.notification_budget.is_due
            self.step_models()
            self.flush_messages()

    @property
    def is_busy(self) -> bool:
        """Whether an engine has requests."""
        return any(model.requests for model in [*self.models.values()])

    @property
    def wait_seconds(self) -> float | None:
        """Seconds to wait for commands; None while only a command brings work."""
        if self.is_busy:
            return 0
        if self.compiling or self.loader.waiting:
            return BACKGROUND_POLL_SECONDS
        ends = map(self.loader.unload_time, self.loader.last_used)
        return max(min(ends) - time.monotonic(), 0.0) if self.loader.last_used else None

    def step_models(self) -> None:
        """Step each engine that has requests once."""
        for model in [*self.models.values()]:
            if model.requests:
                step = partial(
                    model.driver.run_exclusively, partial(self.step_model, model), wait=True
                )
                model.driver.attempt_step(model.name, step)

    def process_commands(self, seconds: float | None) -> None:
        """Admit requests that are ready, then wait for commands and process them."""
        for submit, future in [*self.compiling.values()]:
            if future.done():
                del self.compiling[submit.number]
                self.admit_request(submit, future)
        self.update_loader()
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

    def update_loader(self) -> None:
        """Admit or fail requests that waited for their model, then unload and load models."""
        if not self.loader.models:
            return
        for submit, error in self.loader.take_ready():
            if error is None:
                self.admit_request(submit)
            else:
                self.outgoing.append(Event(number=submit.number, error=error))
        in_use = {name for name, model in [*self.models.items()] if model.requests}
        self.loader.update(in_use | {submit.model for submit, _ in self.compiling.values()})

    def admit_request(
        self, submit: SubmitCommand, future: Future[PendingAnswer] | None = None
    ) -> None:
        """Admit a request or report its error; another thread compiles a new constraint first."""
        if future is None and self.loader.hold(submit):
            return
        if (model := self.models.get(submit.model)) is None:
            return  # the model was removed, and its requests have ended
        request = submit.prompt, submit.format, submit.options
        prepare = partial(model.llm.prepare_answer, *request, limit=submit.limit, fits=submit.fits)
        try:
            answer = prepare(wait=False) if future is None else future.result()
            answer.number, answer.notify_always = submit.number, submit.watched
            answer.has_events = submit.streams or submit.watched
            model.driver.submit(answer)
            model.requests[submit.number] = answer
            event = Event(number=submit.number)
        except NotCompiledError:
            if len(self.compiling) < MAX_COMPILING_REQUESTS:
                self.compiling[submit.number] = (
                    submit,
                    self.compiler_executor.submit(self.background.run, prepare),
                )
                return
            full = QueueFullError(
                f"already {MAX_COMPILING_REQUESTS} constraints wait to be compiled; try again later"
            )
            event = Event(number=submit.number, error=full)
        except Exception as error:
            event = Event(number=submit.number, error=error)
        self.outgoing.append(event)

    def cancel_request(self, command: CancelCommand) -> None:
        """Cancel a request before the next step, or before its constraint is compiled."""
        number, model = command.number, self.models.get(command.model)
        if model is not None and number in model.requests:
            model.driver.cancel_later(model.requests[number])
        elif number in self.compiling:
            self.compiling.pop(number)[1].cancel()
        else:
            self.loader.cancel(command)

    def step_model(self, model: ServedModel) -> bool:
        """Step an engine and collect its events, all of them if no request is left."""
        more = model.driver.process_and_step(self.connection.report_layer)
        began = time.thread_time()
        complete = self.is_due or not more
        if events := model.take_events(complete):
            self.outgoing += events
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
