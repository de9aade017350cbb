"""The connection of a server with its engine process: objects in both directions, in order.

They are pickled, after their length. Only the two hold its ends, which have no name that another
process could find.
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
"""The length before each object."""

PULSE = 0.1
"""Seconds after which the engine process sends an empty message, as a sign of life."""

MOST = 2**18
"""Bytes that the engine process receives between two steps."""

FIELDS = attrgetter(*Step.__slots__)
"""A step as a tuple, which is pickled in an eighth of the time."""

KNOWN = (TooLarge, ValueError, QueueFull, DecodingError)
"""Errors that keep their type. Any other may not survive being pickled."""


class Failure(NamedTuple):
    """An error of a request, as it is sent, and its cause where that is the fault of a client."""

    number: int
    error: BaseException
    cause: BaseException | None


def packed(value: Any) -> bytes:
    """An object as it is sent."""
    body = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return SIZE.pack(len(body)) + body


def put(own: socket.socket, value: Any) -> None:
    """Send an object, and wait while the other process takes none."""
    try:
        own.sendall(packed(value))
    except ConnectionError:
        raise ConnectionEnded from None


def get(own: socket.socket) -> Any:
    """Wait for an object before there is an event loop."""
    (size,) = SIZE.unpack(read(own, SIZE.size))
    return pickle.loads(read(own, size))


def read(own: socket.socket, size: int) -> bytes:
    """Read this many bytes. Raises `ConnectionEnded`."""
    data = b""
    while len(data) < size:
        data += some(own, size - len(data))
    return data


def some(own: socket.socket, size: int) -> bytes:
    """Read one byte or more, this many at most. Raises `ConnectionEnded`."""
    with suppress(ConnectionError):
        if data := own.recv(size):
            return data
    raise ConnectionEnded


class Inbox:
    """Collects bytes into whole objects."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def take(self, data: bytes) -> Iterator[Any]:
        """Objects that end with these bytes."""
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
    """The end of the engine process, whose one thread sends and receives between two steps."""

    def __init__(self, own: socket.socket) -> None:
        self.socket = own
        self.inbox = Inbox()
        self.sent = 0.0

    def receive(self, seconds: float | None) -> Sequence[Command]:
        """Wait for commands, no longer than until the next sign of life is due."""
        if time.monotonic() > self.sent + PULSE:
            self.report([], None)
        seconds = PULSE if seconds is None else seconds
        if not select.select([self.socket], [], [], seconds)[0]:
            return []
        return [*self.inbox.take(some(self.socket, MOST))]

    def report(self, messages: Sequence[Message], charge: Charge | None) -> None:
        """Send messages, which costs no other thread of this process anything."""
        put(self.socket, [*map(encoded, messages)])
        self.sent = time.monotonic()


def encoded(message: Message) -> Any:
    """A message as it is pickled."""
    if not isinstance(message, Progress):
        return message
    if (error := message.error) is not None:
        cause = error.__cause__ if isinstance(error.__cause__, TooLarge) else None
        return Failure(message.number, plain(error), cause and plain(cause))
    steps: list[Any] = [*map(FIELDS, message.steps)]
    return message._replace(steps=steps)


def decoded(message: Any) -> Message:
    """A message as it was before."""
    if isinstance(message, Failure):
        message.error.__cause__ = message.cause
        return Progress(message.number, error=message.error)
    if isinstance(message, Progress):
        sent: Sequence[Any] = message.steps
        return message._replace(steps=[Step(*fields) for fields in sent])
    return cast(dict[str, Stats], message)


def plain(error: BaseException) -> BaseException:
    """An error that can be pickled; its traceback, which stays here, is a note."""
    if isinstance(error, OptionError):
        named = ContextError if isinstance(error, ContextError) else OptionError
        return named(error.param, None, str(error))
    kind = next((each for each in KNOWN if isinstance(error, each)), RuntimeError)
    copy = kind(str(error) if kind is not RuntimeError else repr(error))
    if not isinstance(copy, ValueError):
        copy.add_note("".join(traceback.format_exception(error)))
    return copy
