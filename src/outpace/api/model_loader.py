"""Models that an engine loop loads when they are requested, and unloads when they are idle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Thread

import torch

from outpace.api.background import BackgroundWork
from outpace.api.engine_messages import CancelCommand, LoadError, SubmitCommand
from outpace.api.llm import LLM
from outpace.api.served_model import ServedModel
from outpace.engine.memory import available_bytes, release_memory

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

    @property
    def next_unload_seconds(self) -> float | None:
        """Seconds until a model may be unloaded; None if none of `models` is loaded."""
        times = map(self.unload_time, self.last_used)
        return max(min(times) - time.monotonic(), 0.0) if self.last_used else None


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
