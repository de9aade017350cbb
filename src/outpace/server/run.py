"""A server from its socket to its last request: signals, draining, the watchdog."""

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
"""Seconds between two looks at the engine."""

GRACE = 1.0
"""Seconds that clients have to read the last event of what was given up."""


class Server(uvicorn.Server):
    """Uvicorn's server, ended by this module's own signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where only then, since whoever reads it may connect at once."""
        await super().startup(sockets)
        for own in sockets or ():
            log_address(*own.getsockname()[:2])


def bound(settings: Settings) -> socket.socket:
    """A socket at the address; `ValueError` where that cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind((settings.host, settings.port))
    except OSError as error:
        own.close()
        message = f"port: cannot listen on {settings.host}:{settings.port}: {error}"
        raise OptionError("port", settings.port, message) from error
    return own


class Run:
    """One run of a server, until it is told to end or must."""

    def __init__(self, service: Service, own: socket.socket) -> None:
        self.service = service
        self.socket = own
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
        """Serve; the exit status."""
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
        """End: the first time when all that is in hand is done, the second time at once."""
        if self.ending is None:
            self.ending = asyncio.ensure_future(self.drain())
        else:
            self.server.force_exit = self.server.should_exit = True

    async def drain(self) -> None:
        """Finish what is in hand, or give it up when its time is over."""
        seconds = self.service.settings.drain_seconds
        log.info("draining for %g seconds at most", seconds)
        self.service.drain()
        try:
            async with asyncio.timeout(seconds):
                await self.service.drained()
        except TimeoutError:
            self.service.end(Fault(503, "the server has ended before the answer was whole"))
            await asyncio.sleep(GRACE)
        self.server.should_exit = True

    async def watch(self) -> None:
        """End the process when the engine has died or hangs; measure how late the loop is."""
        loop = asyncio.get_running_loop()
        while (failure := self.service.failure) is None:
            before = loop.time()
            await asyncio.sleep(TICK)
            self.service.metrics.lag.observe(max(loop.time() - before - TICK, 0))
        log.error("%s; the process ends", failure, exc_info=self.service.client.error)
        self.status = 1
        self.service.end(Fault(500, f"{failure}; the server ends"))
        await asyncio.sleep(GRACE)
        self.server.force_exit = self.server.should_exit = True


def run(service: Service, own: socket.socket) -> int:
    """Serve on a bound socket until a signal; the exit status."""
    for name, model in service.models.items():
        log.info("%s: %s, %s", name, model.config.kind.value, model.method)
    gc.collect()
    gc.freeze()  # a collection of all that was loaded would stop every stream
    try:
        return Run(service, own)()
    finally:
        service.client.close()
