"""Uvicorn's protocol, with bounds: the size of headers, and how long a client may take."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from outpace.server.fault import Fault

HEADERS = 64 * 2**10
"""Most bytes of the address and headers of a request, with what comes after a chunked body."""

LINE = len(b": " + b"\r\n")
"""Bytes of a header beside its name and value."""

LOOK = 0.05
"""Seconds between two looks whether a client that sends nothing more has gone."""

BEGIN = b"HTTP/1.1 "
"""What every answer begins with."""

COMMENT = b"3\r\n:\n\n\r\n"
"""A chunk of a stream of events that holds none."""


class Begun:
    """A transport that has sent the first bytes of an answer already."""

    def __init__(self, transport: asyncio.Transport, sent: bytes) -> None:
        self.transport = transport
        self.sent = sent

    def write(self, data: bytes) -> None:
        """Send the rest."""
        self.transport.write(data.removeprefix(self.sent))
        self.sent = b""

    def close(self) -> None:
        """Hang up once all is sent."""
        self.transport.close()

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self.transport.is_closing()


class Protocol(HttpToolsProtocol):
    """One connection, whose client has some `seconds` for the headers of each request.

    As long it may take nothing of what is written to it. A client that sends nothing more after a
    whole request still gets its answer.

    Attributes:
        size: bytes of the address and headers of the present request, as far as they are complete.
        pending: bytes that have come since it began while its headers were not complete, without
            those that came together with its first one.
        halved: whether the client sends nothing more.
        open: requests that are not answered yet.
    """

    def __init__(self, *, seconds: float, **given: Any) -> None:
        super().__init__(**given)
        self.seconds = seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for headers."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # to hear of all that is not taken at once
        self.size = self.pending = 0
        self.halved = False
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
        self.pending += len(data)
        super().data_received(data)
        if self.timer is not None and self.pending > HEADERS:
            self.refuse(too_large())

    def on_message_begin(self) -> None:
        """A new request, perhaps behind another one on the same connection."""
        super().on_message_begin()
        self.size = self.pending = 0
        self.expect()

    def on_url(self, url: bytes) -> None:
        """Count a part of the address."""
        self.count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, also one after a chunked body."""
        self.count(len(name) + len(value) + LINE)
        super().on_header(name, value)

    def count(self, size: int) -> None:
        """Refuse the request, and read no more of it, where these bytes are too many."""
        self.size += size
        if self.size > HEADERS:
            self.refuse(too_large())
            raise ValueError("too large")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or what was not read to its end."""
        self.refuse(Fault(400, msg))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer what was asked where the client sends nothing more; True keeps the way to it."""
        self.open = [cycle for cycle in self.open if not cycle.response_complete]
        if not self.open or self.open[-1].more_body:
            return False
        if not self.halved:
            self.halved = True
            self.expected()
            self.open[-1].keep_alive = False
            self.probe(self.open[0])
            self.loop.call_later(LOOK, self.look_for_reset)
        return True

    def probe(self, cycle: RequestResponseCycle) -> None:
        """Send what changes no answer, since only a client that has gone refuses it."""
        if not cycle.response_started:
            cycle.transport = Begun(self.transport, BEGIN)  # type: ignore[assignment]
            self.transport.write(BEGIN)
        elif cycle.chunked_encoding:
            self.transport.write(COMMENT)

    def look_for_reset(self) -> None:
        """Hang up on a client that has refused what was sent to it."""
        if self.transport.is_closing():
            return
        own = self.transport.get_extra_info("socket")
        if own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(LOOK, self.look_for_reset)

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
        if any(cycle.response_started and not cycle.response_complete for cycle in self.open):
            self.transport.close()  # in the middle of another answer
            return
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        body = fault.body
        self.transport.write(STATUS_LINE[fault.status] + head % len(body) + body)
        self.transport.close()


def too_large() -> Fault:
    """The refusal of headers that are too large."""
    return Fault(431, f"the headers are larger than {HEADERS} bytes")
