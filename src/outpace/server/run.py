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
from outpace.server.app import build_server_app
from outpace.server.http_error import HttpError
from outpace.server.logs import log_address
from outpace.server.protocol import LimitedHttpProtocol
from outpace.server.service import Service
from outpace.server.settings import Settings

LOG = logging.getLogger("outpace.server")

WATCHDOG_SECONDS = 0.1
"""Interval at which the watchdog checks the engine."""

FINAL_EVENT_SECONDS = 1.0
"""Time for clients to read the last event of an aborted request."""


class UvicornServer(uvicorn.Server):
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


def bind_socket(settings: Settings) -> socket.socket:
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


class ServerRun:
    """One run of a server, until a signal or a failure."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self.service = service
        self.socket = listener
        config = uvicorn.Config(
            build_server_app(service),
            http=partial(LimitedHttpProtocol, seconds=service.settings.read_seconds),  # type: ignore[arg-type]
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
        self.server = UvicornServer(config)
        self.status = 0
        self.ending: asyncio.Task[None] | None = None

    def __call__(self) -> int:
        """Serve until the end and return the exit status."""
        uvicorn_loop = self.server.config.get_loop_factory()
        with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
            runner.run(self.serve())
        return self.status

    async def serve(self) -> None:
        """Serve until the end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_signal)
        await self.service.client.start_receiving()
        watchdog = asyncio.ensure_future(self.watch_engine())
        try:
            await self.server.serve(sockets=[self.socket])
        finally:
            watchdog.cancel()

    def handle_signal(self) -> None:
        """Drain on the first signal; exit at once on the second."""
        if self.ending is None:
            self.ending = asyncio.ensure_future(self.drain_requests())
        else:
            self.server.force_exit = self.server.should_exit = True

    async def drain_requests(self) -> None:
        """Finish pending requests, or abort them after `drain_seconds`."""
        seconds = self.service.settings.drain_seconds
        LOG.info("finishing pending requests within %g seconds", seconds)
        self.service.drain()
        try:
            async with asyncio.timeout(seconds):
                await self.service.wait_until_drained()
        except TimeoutError:
            self.service.abort_pending(
                HttpError(503, "the server shut down before the answer was complete")
            )
            await asyncio.sleep(FINAL_EVENT_SECONDS)
        self.server.should_exit = True

    async def watch_engine(self) -> None:
        """Exit when the engine fails or hangs; measure the lag of the event loop."""
        loop = asyncio.get_running_loop()
        while (failure := self.service.failure) is None:
            before = loop.time()
            await asyncio.sleep(WATCHDOG_SECONDS)
            self.service.metrics.lag.observe(max(loop.time() - before - WATCHDOG_SECONDS, 0))
        LOG.error("%s; the server exits", failure, exc_info=self.service.client.error)
        self.status = 1
        self.service.abort_pending(HttpError(500, f"{failure}; the server exits"))
        await asyncio.sleep(FINAL_EVENT_SECONDS)
        self.server.force_exit = self.server.should_exit = True


def serve_until_signal(service: Service, listener: socket.socket) -> int:
    """Serve on a bound socket until a signal; return the exit status."""
    for name, model in service.models.items():
        when = ", loaded when requested" if model.entry.lazy else ""
        LOG.info("%s: %s, %s%s", name, model.config.kind.value, model.method, when)
    gc.collect()
    gc.freeze()  # a collection over all loaded objects would pause every stream
    try:
        return ServerRun(service, listener)()
    finally:
        service.client.close()
