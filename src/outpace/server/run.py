"""Lifetime of a server: listening socket, HTTP protocol, signals, draining, watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from outpace.engine.runner import describe_caches
from outpace.server.app import build_server_app
from outpace.server.http_error import HttpError
from outpace.server.logs import log_address
from outpace.server.service import Service

MAX_HEADER_BYTES = 64 * 2**10
"""Maximum size of request line and headers, including trailers of a chunked body."""

HEADER_LINE_OVERHEAD = len(b": " + b"\r\n")
"""Bytes of a header line besides its name and value."""

RESET_POLL_SECONDS = 0.05
"""Interval at which half-closed connections are checked for a reset."""

RESPONSE_START = b"HTTP/1.1 "
"""First bytes of every response."""

COMMENT_CHUNK = b"3\r\n:\n\n\r\n"
"""A chunk with an empty comment of a server-sent event stream."""


class StartedTransport:
    """Transport that has already sent the first bytes of a response."""

    def __init__(self, transport: asyncio.Transport, sent: bytes) -> None:
        self.transport = transport
        self.sent = sent

    def write(self, data: bytes) -> None:
        self.transport.write(data.removeprefix(self.sent))
        self.sent = b""

    def close(self) -> None:
        self.transport.close()

    def is_closing(self) -> bool:
        return self.transport.is_closing()


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection, whose client has `seconds` to send the headers of each request."""

    # The same limit applies to a client that stops reading. A client that half-closes the
    # connection after a whole request still receives its answer.

    def __init__(self, *, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # report every write that is not accepted at once
        self.size = 0
        """Bytes of request line and headers parsed so far."""
        self.pending = 0
        """Bytes received while headers are incomplete, except with the first byte of a request."""
        self.is_half_closed = False
        self.header_timer: asyncio.TimerHandle | None = None
        self.write_timer: asyncio.TimerHandle | None = None
        self.open_cycles: list[RequestResponseCycle] = []
        self.start_header_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timeouts and notify open requests."""
        self.cancel_header_timeout()
        self.cancel_write_timeout()
        for cycle in self.open_cycles:  # Uvicorn notifies only the last one
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.start_write_timeout()

    def resume_writing(self) -> None:
        """Cancel the timeout: the client has read everything."""
        self.cancel_write_timeout()
        super().resume_writing()

    def start_write_timeout(self) -> None:
        buffered = self.transport.get_write_buffer_size()
        self.write_timer = self.loop.call_later(self.seconds, self.check_write_progress, buffered)

    def check_write_progress(self, buffered: int) -> None:
        """Abort the connection if the client has read nothing since the timeout started."""
        if self.transport.get_write_buffer_size() < buffered:
            self.start_write_timeout()
        else:
            self.transport.abort()

    def cancel_write_timeout(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None

    def start_header_timeout(self) -> None:
        self.cancel_header_timeout()
        self.header_timer = self.loop.call_later(
            self.seconds, self.reject, HttpError(408, "the headers were not received in time")
        )

    def cancel_header_timeout(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None

    def data_received(self, data: bytes) -> None:
        """Count the bytes of incomplete headers, then parse."""
        self.pending += len(data)
        super().data_received(data)
        if self.header_timer is not None and self.pending > MAX_HEADER_BYTES:
            self.reject(headers_too_large_error())

    def on_message_begin(self) -> None:
        """Start a new request, perhaps pipelined after another one."""
        super().on_message_begin()
        self.size = self.pending = 0
        self.start_header_timeout()

    def on_url(self, url: bytes) -> None:
        self.count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of a header, or of a trailer after a chunked body."""
        self.count_header_bytes(len(name) + len(value) + HEADER_LINE_OVERHEAD)
        super().on_header(name, value)

    def count_header_bytes(self, size: int) -> None:
        """Add header bytes; reject the request and stop parsing if there are too many."""
        self.size += size
        if self.size > MAX_HEADER_BYTES:
            self.reject(headers_too_large_error())
            raise ValueError("too large")

    def send_400_response(self, msg: str) -> None:
        self.reject(HttpError(400, msg))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed connection open (return True) until its request is answered."""
        self.open_cycles = [cycle for cycle in self.open_cycles if not cycle.response_complete]
        if not self.open_cycles or self.open_cycles[-1].more_body:
            return False
        if not self.is_half_closed:
            self.is_half_closed = True
            self.cancel_header_timeout()
            self.open_cycles[-1].keep_alive = False
            self.probe_client(self.open_cycles[0])
            self.loop.call_later(RESET_POLL_SECONDS, self.look_for_reset)
        return True

    def probe_client(self, cycle: RequestResponseCycle) -> None:
        """Send bytes that change no answer; a client that has gone replies with a reset."""
        if not cycle.response_started:
            cycle.transport = StartedTransport(self.transport, RESPONSE_START)  # type: ignore[assignment]
            self.transport.write(RESPONSE_START)
        elif cycle.chunked_encoding:
            self.transport.write(COMMENT_CHUNK)

    def look_for_reset(self) -> None:
        """Abort the connection if the client has reset it; otherwise check again later."""
        if self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(RESET_POLL_SECONDS, self.look_for_reset)

    def on_headers_complete(self) -> None:
        """Require a host, and cancel the header timeout; `LimitedBody` limits the body."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or not hosts and self.parser.get_http_version() == "1.1":
            self.reject(HttpError(400, "host: HTTP/1.1 requires exactly one header Host"))
            raise ValueError("no single host")
        self.cancel_header_timeout()
        super().on_headers_complete()
        self.open_cycles = [cycle for cycle in self.open_cycles if not cycle.response_complete] + [
            self.cycle
        ]

    def reject(self, fault: HttpError) -> None:
        """Send an error before the request was read completely, and close."""
        self.cancel_header_timeout()
        if self.transport.is_closing():
            return
        if any(
            cycle.response_started and not cycle.response_complete for cycle in self.open_cycles
        ):
            self.transport.close()  # in the middle of another answer
            return
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        body = fault.body
        self.transport.write(STATUS_LINE[fault.status] + head % len(body) + body)
        self.transport.close()


def headers_too_large_error() -> HttpError:
    return HttpError(431, f"the headers must have at most {MAX_HEADER_BYTES} bytes")


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
        self.deadline = 0.0
        """Reading of `time.monotonic` until which prefixes may be written."""

    def __call__(self) -> int:
        uvicorn_loop = self.server.config.get_loop_factory()
        with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
            runner.run(self.serve())
        return self.status

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_signal)
        await self.service.client.start_receiving()
        watchdog = asyncio.ensure_future(self.watch_engine())
        await self.log_models()
        try:
            await self.server.serve(sockets=[self.socket])
        finally:
            watchdog.cancel()

    def handle_signal(self) -> None:
        """Drain on the first signal; exit at once on the second."""
        if self.ending is None:
            self.ending = asyncio.ensure_future(self.drain_requests())
        else:
            self.deadline = 0.0
            self.server.force_exit = self.server.should_exit = True

    async def drain_requests(self) -> None:
        seconds = self.service.settings.drain_seconds
        LOG.info("finishing pending requests within %g seconds", seconds)
        if any(model.entry.prefix_dir for model in self.service.models.values()):
            self.deadline = time.monotonic() + seconds
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

    async def log_models(self) -> None:
        """Log each model, with the size of its caches if it is loaded."""
        await self.service.client.update_stats()
        for name, model in self.service.models.items():
            caches = model.engine.cache_usage
            state = describe_caches(caches) if caches else "loaded when requested"
            LOG.info("%s: %s, %s, %s", name, model.config.kind.value, model.method, state)

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
    gc.collect()
    gc.freeze()  # a collection over all loaded objects would pause every stream
    run = ServerRun(service, listener)
    try:
        status = run()
    finally:
        service.client.close(run.deadline - time.monotonic())
    for model in service.models.values():
        model.engine.close()
    if are_threads_busy():
        LOG.warning("a thread is still busy; the server exits without waiting for it")
        sys.stdout.flush()
        os._exit(status)
    return status


THREAD_SECONDS = 1.0
"""Time for threads to end, for which the interpreter would wait without a limit."""


def are_threads_busy() -> bool:
    """Wait for all threads that keep the process alive; return whether one did not end."""
    deadline = time.monotonic() + THREAD_SECONDS
    others = [each for each in threading.enumerate() if not each.daemon]
    others.remove(threading.current_thread())
    for thread in others:
        thread.join(max(deadline - time.monotonic(), 0))
    return any(thread.is_alive() for thread in others)
