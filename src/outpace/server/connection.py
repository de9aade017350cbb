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

from outpace.api.engine_messages import (
    ChargeCallback,
    ConnectionEndedError,
    EngineCommand,
    EngineMessage,
    LoadError,
    QueueFullError,
    RequestProgress,
)
from outpace.constraint.pattern import TooLargeError
from outpace.decoding import Step
from outpace.engine.job import DecodingError
from outpace.engine.stats import Stats
from outpace.errors import ContextError, OptionError

LENGTH_HEADER = Struct("!Q")
"""Length of each object, sent before it."""

HEARTBEAT_SECONDS = 0.1
"""Interval after which an idle engine process sends an empty message as a heartbeat."""

MAX_RECEIVE_BYTES = 2**18
"""Maximum number of bytes that the engine process receives between two steps."""

STEP_FIELDS = attrgetter(*Step.__slots__)
"""Convert a step to a tuple, which takes an eighth of the time to pickle."""

PORTABLE_ERRORS = (TooLargeError, ValueError, QueueFullError, LoadError, DecodingError)
"""Error types that are preserved. Others may not survive pickling."""


class RequestFailure(NamedTuple):
    """Error of a request as sent, with its cause if the client is at fault."""

    number: int
    error: BaseException
    cause: BaseException | None


def encode_frame(value: Any) -> bytes:
    """Return an object with its length header, ready to send."""
    body = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return LENGTH_HEADER.pack(len(body)) + body


def send_object(connection: socket.socket, value: Any) -> None:
    """Send an object, blocking until the other process has received it."""
    try:
        connection.sendall(encode_frame(value))
    except ConnectionError:
        raise ConnectionEndedError from None


def receive_object(connection: socket.socket) -> Any:
    """Receive one object, blocking. Used before the event loop starts."""
    (size,) = LENGTH_HEADER.unpack(receive_exactly(connection, LENGTH_HEADER.size))
    return pickle.loads(receive_exactly(connection, size))


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes.

    Raises:
        ConnectionEnded: If the other process has closed the connection.
    """
    data = b""
    while len(data) < size:
        data += receive_some(connection, size - len(data))
    return data


def receive_some(connection: socket.socket, size: int) -> bytes:
    """Receive between 1 and `size` bytes.

    Raises:
        ConnectionEnded: If the other process has closed the connection.
    """
    with suppress(ConnectionError):
        if data := connection.recv(size):
            return data
    raise ConnectionEndedError


class FrameDecoder:
    """Incremental decoder: bytes in, whole objects out."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the objects completed by these bytes."""
        self.buffer += data
        begin = 0
        while len(self.buffer) - begin >= LENGTH_HEADER.size:
            (size,) = LENGTH_HEADER.unpack_from(self.buffer, begin)
            end = begin + LENGTH_HEADER.size + size
            if len(self.buffer) < end:
                break
            yield pickle.loads(self.buffer[begin + LENGTH_HEADER.size : end])
            begin = end
        del self.buffer[:begin]


class EngineConnection:
    """The engine process's end; its only thread sends and receives between two steps."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.inbox = FrameDecoder()
        self.sent = 0.0

    def receive_commands(self, seconds: float | None) -> Sequence[EngineCommand]:
        """Wait for commands, at most until the next heartbeat is due."""
        if time.monotonic() > self.sent + HEARTBEAT_SECONDS:
            self.send_messages([], None)
        seconds = HEARTBEAT_SECONDS if seconds is None else min(seconds, HEARTBEAT_SECONDS)
        if not select.select([self.socket], [], [], seconds)[0]:
            return []
        return [*self.inbox.feed(receive_some(self.socket, MAX_RECEIVE_BYTES))]

    def send_messages(
        self, messages: Sequence[EngineMessage], charge: ChargeCallback | None
    ) -> None:
        """Send messages."""
        send_object(self.socket, [*map(encode_message, messages)])
        self.sent = time.monotonic()


def encode_message(message: EngineMessage) -> Any:
    """Return a message in the form that is pickled."""
    if not isinstance(message, RequestProgress):
        return message
    if (error := message.error) is not None:
        cause = error.__cause__ if isinstance(error.__cause__, TooLargeError) else None
        return RequestFailure(
            message.number, portable_error(error), cause and portable_error(cause)
        )
    steps: list[Any] = [*map(STEP_FIELDS, message.steps)]
    return message._replace(steps=steps)


def decode_message(message: Any) -> EngineMessage:
    """Return the message from its pickled form."""
    if isinstance(message, RequestFailure):
        message.error.__cause__ = message.cause
        return RequestProgress(message.number, error=message.error)
    if isinstance(message, RequestProgress):
        steps: Sequence[Any] = message.steps
        return message._replace(steps=[Step(*fields) for fields in steps])
    return cast(dict[str, Stats], message)


def portable_error(error: BaseException) -> BaseException:
    """Return a picklable copy of an error, with its traceback as a note."""
    if isinstance(error, OptionError):
        error_type = ContextError if isinstance(error, ContextError) else OptionError
        return error_type(error.param, None, str(error))
    copy_type = next(
        (portable for portable in PORTABLE_ERRORS if isinstance(error, portable)), RuntimeError
    )
    copy = copy_type(str(error) if copy_type is not RuntimeError else repr(error))
    if not isinstance(copy, ValueError):
        copy.add_note("".join(traceback.format_exception(error)))
    return copy
