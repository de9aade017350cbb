"""The connection of a server's two processes: objects in both directions, in order.

They are pickled, behind their length. Only the two hold its ends, which have no name that another
process could find.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any, cast

SIZE = Struct("!Q")
"""The length that stands in front of each object."""


def packed(value: Any) -> bytes:
    """An object as it is sent."""
    body = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return SIZE.pack(len(body)) + body


def put(own: socket.socket, value: Any) -> None:
    """Send an object before there is a loop."""
    own.sendall(packed(value))


def get(own: socket.socket) -> Any:
    """Wait for an object before there is a loop; `EOFError` where the other side has ended."""
    (size,) = SIZE.unpack(read(own, SIZE.size))
    return pickle.loads(read(own, size))


def read(own: socket.socket, size: int) -> bytes:
    """So many bytes."""
    data = b""
    while len(data) < size:
        try:
            piece = own.recv(size - len(data))
        except ConnectionError:
            piece = b""
        if not piece:
            raise EOFError("the other side has ended")
        data += piece
    return data


class Inbox:
    """Whole objects out of the bytes that come."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def take(self, data: bytes) -> Iterator[Any]:
        """Those that end with these bytes."""
        self.buffer += data
        begin = 0
        while len(self.buffer) - begin >= SIZE.size:
            (size,) = SIZE.unpack_from(self.buffer, begin)
            end = begin + SIZE.size + size
            if len(self.buffer) < end:
                break
            yield pickle.loads(self.buffer[begin + SIZE.size : end])
            begin = end
        del self.buffer[:begin]


class Channel(asyncio.Protocol):
    """One end in a loop: it never waits for the other side, and keeps what that does not take.

    `taken` is called with each object that comes, and `lost` once nothing comes any more.
    """

    def __init__(self, taken: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self.taken = taken
        self.lost = lost
        self.inbox = Inbox()
        self.transport: asyncio.Transport

    async def join(self, own: socket.socket) -> None:
        """Begin, in the loop that runs."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=own)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way out."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are of a type of their own

    def data_received(self, data: bytes) -> None:
        """Take whole objects out of what has come."""
        for value in self.inbox.take(data):
            self.taken(value)

    def connection_lost(self, exc: Exception | None) -> None:
        """Say so."""
        self.lost()

    def send(self, value: Any) -> None:
        """Send an object; one that cannot be pickled raises, and nothing is sent."""
        self.transport.write(packed(value))
