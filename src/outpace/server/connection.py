"""Connection between the server and its engine process: pickled objects, in order.

Each object follows its length. The socket pair has no name, so no other process can connect.
"""

from __future__ import annotations

import pickle
import select
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from struct import Struct
from typing import Any, NamedTuple, cast

from outpace.api.engine_loop import (
    Charge,
    Command,
    ConnectionEnded,
    Message,
    Progress,
    QueueFull,
)
from outpace.constraint.pattern import TooLarge
from outpace.decoding import Step
from outpace.engine.job import DecodingError
from outpace.engine.stats import Stats
from outpace.errors import ContextError, OptionError

SIZE = Struct("!Q")
"""Length of each object, sent before it."""

PULSE = 0.1
"""Interval after which an idle engine process sends an empty message as a heartbeat."""

MOST = 2**18
"""Maximum number of bytes that the engine process receives between two steps."""

FIELDS = attrgetter(*Step.__slots__)
"""Convert a step to a tuple, which takes an eighth of the time to pickle."""

KNOWN = (TooLarge, ValueError, QueueFull, DecodingError)
"""Error types that are preserved. Others may not survive pickling."""


class Failure(NamedTuple):
    """Error of a request as sent, with its cause if the client is at fault."""

    number: int
    error: BaseException
    cause: BaseException | None


def packed(value: Any) -> bytes:
    """Return an object with its length header, ready to send."""
    body = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return SIZE.pack(len(body)) + body


def put(connection: socket.socket, value: Any) -> None:
    """Send an object, blocking until the other process has received it."""
    try:
        connection.sendall(packed(value))
    except ConnectionError:
        raise ConnectionEnded from None


def get(connection: socket.socket) -> Any:
    """Receive one object, blocking. Used before the event loop starts."""
    (size,) = SIZE.unpack(read(connection, SIZE.size))
    return pickle.loads(read(connection, size))


def read(connection: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes.

    Raises:
        ConnectionEnded: If the other process has closed the connection.
    """
    data = b""
    while len(data) < size:
        data += some(connection, size - len(data))
    return data


def some(connection: socket.socket, size: int) -> bytes:
    """Receive between 1 and `size` bytes.

    Raises:
        ConnectionEnded: If the other process has closed the connection.
    """
    with suppress(ConnectionError):
        if data := connection.recv(size):
            return data
    raise ConnectionEnded


class Inbox:
    """Incremental decoder: bytes in, whole objects out."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def take(self, data: bytes) -> Iterator[Any]:
        """Yield the objects completed by these bytes."""
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


class EngineConnection:
    """The engine process's end; its only thread sends and receives between two steps."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.inbox = Inbox()
        self.sent = 0.0

    def receive(self, seconds: float | None) -> Sequence[Command]:
        """Wait for commands, at most until the next heartbeat is due."""
        if time.monotonic() > self.sent + PULSE:
            self.report([], None)
        seconds = PULSE if seconds is None else seconds
        if not select.select([self.socket], [], [], seconds)[0]:
            return []
        return [*self.inbox.take(some(self.socket, MOST))]

    def report(self, messages: Sequence[Message], charge: Charge | None) -> None:
        """Send messages."""
        put(self.socket, [*map(encoded, messages)])
        self.sent = time.monotonic()


def encoded(message: Message) -> Any:
    """Return a message in the form that is pickled."""
    if not isinstance(message, Progress):
        return message
    if (error := message.error) is not None:
        cause = error.__cause__ if isinstance(error.__cause__, TooLarge) else None
        return Failure(message.number, plain(error), cause and plain(cause))
    steps: list[Any] = [*map(FIELDS, message.steps)]
    return message._replace(steps=steps)


def decoded(message: Any) -> Message:
    """Return the message from its pickled form."""
    if isinstance(message, Failure):
        message.error.__cause__ = message.cause
        return Progress(message.number, error=message.error)
    if isinstance(message, Progress):
        steps: Sequence[Any] = message.steps
        return message._replace(steps=[Step(*fields) for fields in steps])
    return cast(dict[str, Stats], message)


def plain(error: BaseException) -> BaseException:
    """Return a picklable copy of an error, with its traceback as a note."""
    if isinstance(error, OptionError):
        error_type = ContextError if isinstance(error, ContextError) else OptionError
        return error_type(error.param, None, str(error))
    copy_type = next((portable for portable in KNOWN if isinstance(error, portable)), RuntimeError)
    copy = copy_type(str(error) if copy_type is not RuntimeError else repr(error))
    if not isinstance(copy, ValueError):
        copy.add_note("".join(traceback.format_exception(error)))
    return copy
