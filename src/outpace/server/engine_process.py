"""The engine process, which loads the models and decodes: start, connection, exit."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import Any, NamedTuple, cast

import torch

from outpace.api.engine_client import (
    ChargeCallback,
    ConnectionEndedError,
    EngineClient,
    EngineCommand,
    EngineDiedError,
    EngineMessage,
    InspectCommand,
    LoadError,
    QueueFullError,
)
from outpace.api.engine_loop import EngineLoop
from outpace.api.output import Event
from outpace.constraint.pattern import TooLargeError
from outpace.constraint.schema import MAX_SCHEMA_DEPTH
from outpace.engine.job import DecodingError
from outpace.engine.stats import Stats
from outpace.errors import ContextError, OptionError
from outpace.server.logs import LogFormat, start_log
from outpace.server.models import ModelInfo, describe_models, load_all_models, load_text
from outpace.server.settings import Entry
from outpace.server.start import EngineHandle

LENGTH_HEADER = Struct("!Q")
"""Length of each object, sent before it."""

HEARTBEAT_SECONDS = 0.1
"""Interval after which an engine process without messages sends the size of its pass."""

MAX_RECEIVE_BYTES = 2**18
"""Maximum number of bytes that the engine process receives between two steps."""

PORTABLE_ERRORS = (TooLargeError, ValueError, QueueFullError, LoadError, DecodingError)
"""Error types that are preserved. Others may not survive pickling."""


class RequestFailure(NamedTuple):
    """Error of a request as sent, with its cause if the client is at fault."""

    number: int
    error: BaseException
    cause: BaseException | None


def encode_frame(value: Any) -> bytes:
    body = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return LENGTH_HEADER.pack(len(body)) + body


def send_object(connection: socket.socket, value: Any) -> None:
    try:
        connection.sendall(encode_frame(value))
    except ConnectionError:
        raise ConnectionEndedError from None


def receive_object(connection: socket.socket) -> Any:
    """Receive one object, blocking. Used before the event loop starts."""
    (size,) = LENGTH_HEADER.unpack(receive_exactly(connection, LENGTH_HEADER.size))
    return pickle.loads(receive_exactly(connection, size))


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += receive_some(connection, size - len(data))
    return data


def receive_some(connection: socket.socket, size: int) -> bytes:
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
        self.sent, self.sent_size = 0.0, 1.0

    def receive_commands(self, seconds: float | None) -> Sequence[EngineCommand]:
        """Wait for commands, at most until the next heartbeat is due."""
        self.report_layer(1.0)
        seconds = HEARTBEAT_SECONDS if seconds is None else min(seconds, HEARTBEAT_SECONDS)
        if not select.select([self.socket], [], [], seconds)[0]:
            return []
        return [*self.inbox.feed(receive_some(self.socket, MAX_RECEIVE_BYTES))]

    def report_layer(self, size: float) -> None:
        """Send a heartbeat if one is due, or if its time limit changes."""
        if size != self.sent_size or time.monotonic() > self.sent + HEARTBEAT_SECONDS:
            self.sent_size = size
            self.send_messages([size], None)

    def send_messages(
        self, messages: Sequence[EngineMessage], charge: ChargeCallback | None
    ) -> None:
        send_object(self.socket, [*map(encode_message, messages)])
        self.sent = time.monotonic()


def encode_message(message: EngineMessage) -> Any:
    if not isinstance(message, Event) or (error := message.error) is None:
        return message
    cause = error.__cause__ if isinstance(error.__cause__, TooLargeError) else None
    return RequestFailure(message.number, portable_error(error), cause and portable_error(cause))


def decode_message(message: EngineMessage | RequestFailure) -> EngineMessage:
    if not isinstance(message, RequestFailure):
        return message
    message.error.__cause__ = message.cause
    return Event(number=message.number, error=message.error)


def portable_error(error: BaseException) -> BaseException:
    """Return a picklable copy of an error, with its traceback as a note."""
    if isinstance(error, OptionError):
        error_type = ContextError if isinstance(error, ContextError) else OptionError
        return error_type(error.param, None, error.reason_with_value)
    copy_type = next(
        (portable for portable in PORTABLE_ERRORS if isinstance(error, portable)), RuntimeError
    )
    copy = copy_type(str(error) if copy_type is not RuntimeError else repr(error))
    if not isinstance(copy, ValueError):
        copy.add_note("".join(traceback.format_exception(error)))
    return copy


MAX_MISSED_HEARTBEATS = 10
"""Missed heartbeats after which the time since the last one is measured."""

EXIT_SECONDS = 1.0
"""Seconds in which an idle process stores its measurements and exits."""


@dataclass(frozen=True, kw_only=True)
class LoadCommand:
    """The models that the engine process loads; small ones are fastest on one thread."""

    models: Mapping[str, Entry]
    small: bool
    verbose: bool = False
    log_format: LogFormat = "text"


class EngineProcess(EngineClient, asyncio.Protocol):
    """Client of an engine loop in another process, for one event loop.

    Raises:
        ValueError: If the process cannot load the models.
    """

    CLOSED_MESSAGE = "the engine process was closed"

    def __init__(self, command: LoadCommand, handle: EngineHandle | None = None) -> None:
        super().__init__()
        self.latest_stats: Mapping[str, Stats] = {}
        """Engine statistics as of the last measurement."""
        self.silent_seconds = 0.0
        """Seconds without data from the process, counted only while this loop ran."""
        self.stats_received = asyncio.Event()
        self.inbox = FrameDecoder()
        self.transport: asyncio.Transport
        self.handle = EngineHandle() if handle is None else handle
        self.process, self.socket = self.handle.process, self.handle.socket
        try:
            self.model_infos = self.load_models(command)
            """Descriptions of the loaded models, by name."""
            for name, text in self.texts.items():
                text.set_model(self.model_infos[name].config)
        except BaseException:
            self.close()
            raise

    def load_models(self, command: LoadCommand) -> Mapping[str, ModelInfo]:
        """Send the command, and load the tokenizers while the process loads the models."""
        try:
            send_object(self.socket, command)
            self.texts = {name: load_text(name, entry) for name, entry in command.models.items()}
            loaded = receive_object(self.socket)
        except ConnectionEndedError:
            raise ValueError(f"the models cannot be loaded: {self.exit_description()}") from None
        if isinstance(loaded, ValueError):
            raise loaded
        return cast(Mapping[str, ModelInfo], loaded)

    async def start_receiving(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, sock=self.socket)
        self.track_silence(loop)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are of a separate type

    def track_silence(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.is_alive:
            self.silent_seconds += HEARTBEAT_SECONDS
            loop.call_later(HEARTBEAT_SECONDS, self.track_silence, loop)

    @property
    def heartbeat(self) -> float:
        """Value of `time.monotonic` at the last data; 0 while heartbeats arrive."""
        return (
            time.monotonic() - self.silent_seconds
            if self.silent_seconds > MAX_MISSED_HEARTBEATS * HEARTBEAT_SECONDS
            else 0.0
        )

    @property
    def stats(self) -> Mapping[str, Stats]:
        """Requests and memory of the engines as of the last measurement."""
        return self.latest_stats

    async def update_stats(self) -> None:
        """Update `stats`; they remain unchanged if the process does not answer in time."""
        self.stats_received.clear()
        self.send_command(InspectCommand())
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_MISSED_HEARTBEATS * HEARTBEAT_SECONDS):
                await self.stats_received.wait()

    def send_command(self, command: EngineCommand) -> None:
        """Send a command, unless the process has ended."""
        try:
            if self.is_alive:
                self.transport.write(encode_frame(command))
        except RecursionError:
            raise OptionError(
                "schema", None, f"it is too large: it is nested more than {MAX_SCHEMA_DEPTH} deep"
            ) from None

    def data_received(self, data: bytes) -> None:
        self.silent_seconds = 0.0
        for messages in self.inbox.feed(data):
            for message in map(decode_message, messages):
                if isinstance(message, float):
                    self.layer_size = message
                elif isinstance(message, dict):
                    self.latest_stats = message
                    self.stats_received.set()
                elif (request := self.requests.get(message.number)) is not None:
                    request.add_event(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all requests if the process has exited unexpectedly."""
        if self.is_alive:
            self.error = EngineDiedError(self.exit_description())
            self.fail_requests()

    def exit_description(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        status = self.process.returncode
        if status is not None and status < 0:
            how = f"by {signal.Signals(-status).name}"
            how += ", as the out-of-memory killer does" if status == -signal.SIGKILL else ""
        else:
            how = f"with status {status}"
        return f"the engine process exited {how}"

    def close(self, seconds: float = 0.0) -> None:
        """End the connection, and kill the process if it does not exit, as in a long pass.

        It may write prefixes for some seconds.
        """
        self.is_closed = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(seconds, EXIT_SECONDS))
        self.handle.close()


def main(descriptor: int) -> None:
    """Load the models that the server requests, then decode until it exits."""
    connection = socket.socket(fileno=descriptor)
    loop = EngineLoop(EngineConnection(connection))
    try:
        load_command: LoadCommand = receive_object(connection)
        start_log(verbose=load_command.verbose, log_format=load_command.log_format)
        if load_command.small:
            torch.set_num_threads(1)  # before weight layouts are benchmarked
        try:
            for name, model in load_all_models(load_command.models).items():
                loop.add_model(name, model)
            model_infos = describe_models(load_command.models)
        except ValueError as error:
            send_object(connection, portable_error(error))
            return
        send_object(connection, model_infos)
        gc.collect()
        gc.freeze()  # a collection over all loaded objects would pause every stream
        loop.run()
    except ConnectionEndedError:
        for served in loop.models.values():
            served.llm.finish()
        os._exit(0)  # the server has ended
