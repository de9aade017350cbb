"""Engine loop in a thread of this process, connected to event loops by a queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

from outpace.api.engine_client import (
    ChargeCallback,
    ConnectionEndedError,
    EngineClient,
    EngineCommand,
    EngineDiedError,
    EngineMessage,
    PendingRequest,
    RemoveCommand,
)
from outpace.api.engine_loop import EngineLoop, LazyModel
from outpace.api.llm import LLM
from outpace.api.output import Event
from outpace.engine.stats import Stats

LOG = logging.getLogger(__name__)

DELIVERY_HOPS = 4
"""Event-loop iterations after which coroutines that wait for an event have passed it on."""


class EngineThread(EngineClient):
    """An engine loop in a thread of this process, for any number of event loops.

    Attributes:
        command_queue: Commands for the loop; None ends it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.command_queue: SimpleQueue[EngineCommand | None] = SimpleQueue()
        self.last_report = 0.0
        self.loop = EngineLoop(self)
        self.thread = Thread(target=self.run_loop, name="outpace-engine", daemon=True)
        self.thread.start()

    def add_model(self, name: str, model: LLM | LazyModel) -> None:
        """Serve a model; raises `ValueError` if the name is taken."""
        if name in self.loop.models or name in self.loop.loader.models:
            raise ValueError(f"name: a model {name!r} is already served")
        self.loop.add_model(name, model)

    def remove_model(self, name: str) -> None:
        """Stop serving a model; its requests end with an error."""
        self.send_command(RemoveCommand(name))
        for request in [*self.requests.values()]:
            if request.model.name == name:
                request.fail(EngineDiedError(self.CLOSED_MESSAGE))

    def run_loop(self) -> None:
        """Run the loop until it is closed, or until an engine fails repeatedly."""
        try:
            self.loop.run()
        except ConnectionEndedError:
            self.loop.close()
        except BaseException as error:
            LOG.exception("the engine loop has ended")
            self.error = error
        finally:
            self.last_report = 0.0
            self.fail_requests()

    @property
    def heartbeat(self) -> float:
        """Value of `time.monotonic` at the last report of the current round; 0 between rounds."""
        return self.last_report

    @property
    def stats(self) -> Mapping[str, Stats]:
        """Requests and memory of each engine, by model name."""
        return {name: model.driver.stats for name, model in [*self.loop.models.items()]}

    async def start_receiving(self) -> None:
        """Do nothing: each event loop receives the events of its requests."""

    async def update_stats(self) -> None:
        """Do nothing: `stats` reads the engines directly."""

    def send_command(self, command: EngineCommand) -> None:
        """Queue a command."""
        self.command_queue.put(command)

    def close(self, seconds: float = 0.0) -> None:
        """End the loop; pending requests end with an error."""
        self.is_closed = True
        self.command_queue.put(None)

    def receive_commands(self, seconds: float | None) -> list[EngineCommand]:
        """Wait for commands, in the thread of the loop."""
        self.last_report = 0.0
        found: list[EngineCommand] = []
        with suppress(Empty):
            while (command := self.command_queue.get(timeout=0 if found else seconds)) is not None:
                found.append(command)
            raise ConnectionEndedError
        self.report_layer(1.0)
        return found

    def report_layer(self, size: float) -> None:
        """Note that a layer begins, in the thread of the loop."""
        self.layer_size, self.last_report = size, time.monotonic()

    def send_messages(
        self, messages: Sequence[EngineMessage], charge: ChargeCallback | None
    ) -> None:
        """Deliver events to the event loops of the requests."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[PendingRequest, Event]]] = {}
        for each in messages:
            if isinstance(each, Event) and (request := self.requests.get(each.number)):
                by_loop.setdefault(request.loop, []).append((request, each))
        for loop, found in by_loop.items():
            try:
                loop.call_soon_threadsafe(deliver_events, loop, found, charge)
            except RuntimeError:  # the event loop is closed, so no request waits
                for request, _ in found:
                    request.cancel()
                    request.release_place()


def deliver_events(
    loop: asyncio.AbstractEventLoop,
    found: Sequence[tuple[PendingRequest, Event]],
    charge: ChargeCallback | None,
) -> None:
    """Deliver events in the event loop of the requests, and charge the CPU time that follows."""
    began = time.thread_time()
    for request, event in found:
        request.add_event(event)

    def charge_after(turns: int = DELIVERY_HOPS) -> None:
        if turns:
            loop.call_soon(charge_after, turns - 1)
        elif charge is not None:
            charge(time.thread_time() - began)

    if charge is not None:
        charge_after()
