"""Loop that owns engines: it receives commands, and sends the events of their requests.

One thread runs it. Each round receives commands, steps every engine once, and sends all progress as
one message. Its `CommandConnection` hides whether the clients are in this process or another.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from outpace.api.background import BackgroundWork
from outpace.api.engine_messages import (
    CancelCommand,
    CommandConnection,
    EngineMessage,
    InspectCommand,
    QueueFullError,
    RemoveCommand,
    RequestProgress,
    SubmitCommand,
)
from outpace.api.llm import LLM
from outpace.api.model_loader import LazyModel, ModelLoader
from outpace.api.pending_answer import PendingAnswer
from outpace.api.served_model import ActiveRequest, ServedModel
from outpace.constraint.compiler import NotCompiledError

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
        self.background = BackgroundWork()
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
    def wait_seconds(self) -> float | None:
        """Seconds to wait for commands; None while only a command brings work."""
        if any(model.requests for model in [*self.models.values()]):
            return 0
        if self.compiling or self.loader.waiting:
            return BACKGROUND_POLL_SECONDS
        return self.loader.next_unload_seconds

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
                self.outgoing.append(RequestProgress(submit.number, error=error))
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
                    self.compiler_executor.submit(self.background.run, prepare),
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
        else:
            self.loader.cancel(command)

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
