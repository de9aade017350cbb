"""Uvicorn's protocol, with bounds: the size of headers, and how long a client may take."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from outpace.server.fault import Fault

HEADERS = 64 * 2**10
"""Most bytes of a request's line and headers."""


class Protocol(HttpToolsProtocol):
    """One connection, whose client has some `seconds` for the headers of each request.

    As long it may take nothing of what is written to it.
    """

    def __init__(self, *, seconds: float, **given: Any) -> None:
        super().__init__(**given)
        self.seconds = seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for headers."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # to hear of all that is not taken at once
        self.size = 0
        self.timer: asyncio.TimerHandle | None = None
        self.patience: asyncio.TimerHandle | None = None
        self.open: list[RequestResponseCycle] = []
        self.expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self.expected()
        self.taken()
        for cycle in self.open:  # Uvicorn tells the last one alone
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Something waits until the client takes it."""
        super().pause_writing()
        self.offer()

    def resume_writing(self) -> None:
        """The client has taken all of it."""
        self.taken()
        super().resume_writing()

    def offer(self) -> None:
        """Give the client time to take some of what waits."""
        left = self.transport.get_write_buffer_size()
        self.patience = self.loop.call_later(self.seconds, self.look, left)

    def look(self, left: int) -> None:
        """Hang up on a client that has taken nothing since so much was left."""
        if self.transport.get_write_buffer_size() < left:
            self.offer()
        else:
            self.transport.abort()

    def taken(self) -> None:
        """Nothing waits any more."""
        if self.patience is not None:
            self.patience.cancel()
            self.patience = None

    def expect(self) -> None:
        """Give the client time for its headers."""
        self.expected()
        self.timer = self.loop.call_later(
            self.seconds, self.refuse, Fault(408, "no headers in time")
        )

    def expected(self) -> None:
        """The headers have come."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def data_received(self, data: bytes) -> None:
        """Count what has come of headers that are not complete."""
        if self.timer is not None:
            self.size += len(data)
        super().data_received(data)
        if self.timer is not None and self.size > HEADERS:
            self.refuse(Fault(431, f"the headers are larger than {HEADERS} bytes"))

    def on_message_begin(self) -> None:
        """A new request, perhaps behind another one on the same connection."""
        super().on_message_begin()
        self.size = 0
        self.expect()

    def on_headers_complete(self) -> None:
        """From here on, bodies are counted elsewhere."""
        self.expected()
        super().on_headers_complete()
        self.open = [cycle for cycle in self.open if not cycle.response_complete] + [self.cycle]

    def refuse(self, fault: Fault) -> None:
        """Answer without having heard the end of the question, and hang up."""
        self.expected()
        if self.transport.is_closing():
            return
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        body = fault.body
        self.transport.write(STATUS_LINE[fault.status] + head % len(body) + body)
        self.transport.close()
