"""Lifetime of a server: listening socket, signals, draining, watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn

from outpace.errors import OptionError
from outpace.server.app import build
from outpace.server.fault import Fault
from outpace.server.logs import log_address
from outpace.server.protocol import Protocol
from outpace.server.service import Service
from outpace.server.settings import Settings

log = logging.getLogger("outpace.server")

TICK = 0.1
"""Interval at which the watchdog checks the engine."""

GRACE = 1.0
"""Time for clients to read the last event of an aborted request."""


class Server(uvicorn.Server):
    """Uvicorn's server, without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers; `ServerRun` does."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then log the address: readers of the log may connect at once."""
        await super().startup(sockets)
        for listener in sockets or ():
            log_address(*listener.getsockname()[:2])


def bound(settings: Settings) -> socket.socket:
    """Return a socket bound to the configured address.

    Raises:
        OptionError: If the address is not available.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        message = f"port: cannot listen on {settings.host}:{settings.port}: {error}"
        raise OptionError("port", settings.port, message) from error
    return listener


class Run:
    """One run of a server, until a signal or a failure."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self.service = service
        self.socket = listener
        config = uvicorn.Config(
            build(service),
            http=partial(Protocol, seconds=service.settings.read_seconds),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_level="warning",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
        )
        self.server = Server(config)
        self.status = 0
        self.ending: asyncio.Task[None] | None = None

    def __call__(self) -> int:
        """Serve until the end and return the exit status."""
        uvicorn_loop = self.server.config.get_loop_factory()
        with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
            runner.run(self.main())
        return self.status

    async def main(self) -> None:
        """Serve until the end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self.service.client.join()
        watchdog = asyncio.ensure_future(self.watch())
        try:
            await self.server.serve(sockets=[self.socket])
        finally:
            watchdog.cancel()

    def stop(self) -> None:
        """Drain on the first signal; exit at once on the second."""
        if self.ending is None:
            self.ending = asyncio.ensure_future(self.drain())
        else:
            self.server.force_exit = self.server.should_exit = True

    async def drain(self) -> None:
        """Finish pending requests, or abort them after `drain_seconds`."""
        seconds = self.service.settings.drain_seconds
        log.info("finishing pending requests within %g seconds", seconds)
        self.service.drain()
        try:
            async with asyncio.timeout(seconds):
                await self.service.drained()
        except TimeoutError:
            self.service.end(Fault(503, "the server shut down before the answer was complete"))
            await asyncio.sleep(GRACE)
        self.server.should_exit = True

    async def watch(self) -> None:
        """Exit when the engine fails or hangs; measure the lag of the event loop."""
        loop = asyncio.get_running_loop()
        while (failure := self.service.failure) is None:
            before = loop.time()
            await asyncio.sleep(TICK)
            self.service.metrics.lag.observe(max(loop.time() - before - TICK, 0))
        log.error("%s; the server exits", failure, exc_info=self.service.client.error)
        self.status = 1
        self.service.end(Fault(500, f"{failure}; the server exits"))
        await asyncio.sleep(GRACE)
        self.server.force_exit = self.server.should_exit = True


def run(service: Service, listener: socket.socket) -> int:
    """Serve on a bound socket until a signal; return the exit status."""
    for name, model in service.models.items():
        log.info("%s: %s, %s", name, model.config.kind.value, model.method)
    gc.collect()
    gc.freeze()  # a collection over all loaded objects would pause every stream
    try:
        return Run(service, listener)()
    finally:
        service.client.close()
