"""Engine loop in a thread of this process, connected to event loops by a queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

from outpace.api.engine_client import EngineClient, EngineDied, PendingRequest
from outpace.api.engine_loop import (
    Charge,
    Command,
    ConnectionEnded,
    EngineLoop,
    Message,
    Progress,
    Remove,
    ServedModel,
)
from outpace.api.llm import LLM
from outpace.engine.stats import Stats

LOG = logging.getLogger(__name__)

HOPS = 4
"""Event-loop iterations after which coroutines that wait for an event have passed it on."""


class EngineThread(EngineClient):
    """An engine loop in a thread of this process, for any number of event loops.

    Attributes:
        command_queue: Commands for the loop; None ends it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.commands: SimpleQueue[Command | None] = SimpleQueue()
        self.began = 0.0
        self.loop = EngineLoop(self)
        self.thread = Thread(target=self.run, name="outpace-engine", daemon=True)
        self.thread.start()

    def add(self, name: str, llm: LLM) -> None:
        """Serve a model; raises `ValueError` if the name is taken."""
        if name in self.loop.models:
            raise ValueError(f"name: a model {name!r} is already served")
        self.loop.models[name] = ServedModel(name, llm)

    def remove(self, name: str) -> None:
        """Stop serving a model; its requests end with an error."""
        self.send(Remove(name))
        for request in [*self.requests.values()]:
            if request.model.name == name:
                request.fail(EngineDied(self.CLOSED))

    def run(self) -> None:
        """Run the loop until it is closed, or until an engine fails repeatedly."""
        try:
            self.loop.run()
        except ConnectionEnded:
            self.loop.close()
        except BaseException as error:
            LOG.exception("the engine loop has ended")
            self.error = error
        finally:
            self.began = 0.0
            self.fail()

    @property
    def heartbeat(self) -> float:
        """Value of `time.monotonic` at the start of the current round; 0 between rounds."""
        return self.began

    @property
    def stats(self) -> Mapping[str, Stats]:
        """Requests and memory of each engine, by model name."""
        return {name: model.driver.stats for name, model in self.loop.models.items()}

    async def join(self) -> None:
        """Do nothing: each event loop receives the progress of its own requests."""

    async def measure(self) -> None:
        """Do nothing: `stats` reads the engines directly."""

    def send(self, command: Command) -> None:
        """Queue a command."""
        self.commands.put(command)

    def close(self) -> None:
        """End the loop; pending requests end with an error."""
        self.closed = True
        self.commands.put(None)

    def receive(self, seconds: float | None) -> list[Command]:
        """Wait for commands, in the thread of the loop."""
        self.began = 0.0
        found: list[Command] = []
        with suppress(Empty):
            while (command := self.commands.get(timeout=0 if found else seconds)) is not None:
                found.append(command)
            raise ConnectionEnded
        self.began = time.monotonic()
        return found

    def report(self, messages: Sequence[Message], charge: Charge | None) -> None:
        """Deliver progress to the event loops of the requests."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[PendingRequest, Progress]]] = {}
        for each in messages:
            if isinstance(each, Progress) and (request := self.requests.get(each.number)):
                by_loop.setdefault(request.loop, []).append((request, each))
        for loop, found in by_loop.items():
            try:
                loop.call_soon_threadsafe(deliver, loop, found, charge)
            except RuntimeError:  # the event loop is closed, so no request waits
                for request, _ in found:
                    request.cancel()
                    request.leave()


def deliver(
    loop: asyncio.AbstractEventLoop,
    found: Sequence[tuple[PendingRequest, Progress]],
    charge: Charge | None,
) -> None:
    """Apply progress in the event loop of the requests, and charge the CPU time that follows."""
    began = time.thread_time()
    for request, progress in found:
        request.receive(progress)

    def done(turns: int = HOPS) -> None:
        if turns:
            loop.call_soon(done, turns - 1)
        elif charge is not None:
            charge(time.thread_time() - began)

    if charge is not None:
        done()
