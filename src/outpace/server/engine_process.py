"""The engine process, which loads the models and decodes: start, connection, exit."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import torch

from outpace.api.engine_client import EngineClient, EngineDied
from outpace.api.engine_loop import (
    Command,
    ConnectionEnded,
    EngineLoop,
    Inspect,
    ServedModel,
)
from outpace.api.text import Text
from outpace.checkpoints.load import load_tokenizer
from outpace.constraint.compiler import DEEPEST
from outpace.engine.stats import Stats
from outpace.errors import OptionError
from outpace.server.connection import (
    PULSE,
    EngineConnection,
    Inbox,
    decoded,
    get,
    packed,
    plain,
    put,
)
from outpace.server.logs import start_log
from outpace.server.models import Known, load_all
from outpace.server.settings import Entry

SILENCE = 10
"""Missed heartbeats after which the current engine step counts as hanging."""

CODE = """
import sys
sys.path[:] = {path!r}
from outpace.server.parent import exit_with_parent
exit_with_parent()
from outpace.server.engine_process import main
main({number})
"""
"""Code that the process runs. It searches modules where this process does, and nowhere else."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The models that the engine process loads; small ones are fastest on one thread."""

    models: Mapping[str, Entry]
    small: bool
    verbose: bool = False


class EngineProcess(EngineClient, asyncio.Protocol):
    """Client of an engine loop in another process, for one event loop.

    Attributes:
        model_infos: Descriptions of the loaded models, by name.
        texts: Tokenizers of the models, by name.
        latest_stats: Engine statistics as of the last measurement.
        silent_seconds: Seconds without data from the process, counted only while this loop ran.

    Raises:
        ValueError: If the process cannot load the models.
    """

    CLOSED = "the engine process was closed"

    def __init__(self, command: Order) -> None:
        super().__init__()
        self.measured: Mapping[str, Stats] = {}
        self.silent = 0.0
        self.answered = asyncio.Event()
        self.inbox = Inbox()
        self.transport: asyncio.Transport
        self.socket, engine_socket = socket.socketpair()
        with engine_socket:
            self.process = started(engine_socket.fileno())
        try:
            self.known = self.load(command)
            self.texts = {name: self.text(name, entry) for name, entry in command.models.items()}
        except BaseException:
            self.close()
            raise

    def load(self, command: Order) -> Mapping[str, Known]:
        """Send the command and wait until all models are loaded."""
        try:
            put(self.socket, command)
            loaded = get(self.socket)
        except ConnectionEnded:
            raise ValueError(f"the models cannot be loaded: {self.ending()}") from None
        if isinstance(loaded, ValueError):
            raise loaded
        return cast(Mapping[str, Known], loaded)

    def text(self, name: str, entry: Entry) -> Text:
        """Return the tokenizer of a model. The server tokenizes prompts itself."""
        text = Text(self.known[name].place, load_tokenizer(entry.path))
        text.limit(self.known[name].config.max_length)
        return text

    async def join(self) -> None:
        """Start receiving messages in the running event loop."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, sock=self.socket)
        self.listen(loop)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are of a separate type

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measure the time without data, excluding time in which this loop was blocked."""
        if self.alive:
            self.silent += PULSE
            loop.call_later(PULSE, self.listen, loop)

    @property
    def heartbeat(self) -> float:
        """Start time of the step that has been silent too long; 0 while heartbeats arrive."""
        return time.monotonic() - self.silent if self.silent > SILENCE * PULSE else 0.0

    @property
    def stats(self) -> Mapping[str, Stats]:
        """Requests and memory of the engines as of the last measurement."""
        return self.measured

    async def measure(self) -> None:
        """Update `stats`; they remain unchanged if the process does not answer in time."""
        self.answered.clear()
        self.send(Inspect())
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENCE * PULSE):
                await self.answered.wait()

    def send(self, command: Command) -> None:
        """Send a command, unless the process has ended."""
        try:
            if self.alive:
                self.transport.write(packed(command))
        except RecursionError:
            message = f"schema: nested too deeply; at most {DEEPEST} levels are allowed"
            raise OptionError("schema", None, message) from None

    def data_received(self, data: bytes) -> None:
        """Decode messages and pass them to their requests."""
        self.silent = 0.0
        for messages in self.inbox.take(data):
            for message in map(decoded, messages):
                if isinstance(message, dict):
                    self.measured = message
                    self.answered.set()
                elif (request := self.requests.get(message.number)) is not None:
                    request.receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all requests if the process has exited unexpectedly."""
        if self.alive:
            self.error = EngineDied(self.ending())
            self.fail()

    def ending(self) -> str:
        """Describe how the process exited."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        status = self.process.returncode
        if status is not None and status < 0:
            how = f"by {signal.Signals(-status).name}"
            how += ", as the out-of-memory killer does" if status == -signal.SIGKILL else ""
        else:
            how = f"with status {status}"
        return f"the engine process exited {how}"

    def close(self) -> None:
        """Kill the process, which has no state to save."""
        self.closed = True
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.socket.close()


def started(descriptor: int) -> subprocess.Popen[bytes]:
    """Start a process that inherits one end of the connection.

    Ctrl-C signals all processes of a terminal. The engine process ignores it, so that the server
    can finish pending requests first.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        code = CODE.format(path=sys.path, number=descriptor)
        command = [sys.executable, "-c", code]
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[descriptor])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def main(descriptor: int) -> None:
    """Load the models that the server requests, then decode until it exits."""
    connection = socket.socket(fileno=descriptor)
    try:
        load_command: Order = get(connection)
        start_log(verbose=load_command.verbose)
        if load_command.small:
            torch.set_num_threads(1)  # before weight layouts are benchmarked
        try:
            models = load_all(load_command.models)
        except ValueError as error:
            put(connection, plain(error))
            return
        put(connection, {name: info for name, (_, info) in models.items()})
        gc.collect()
        gc.freeze()  # a collection over all loaded objects would pause every stream
        loop = EngineLoop(EngineConnection(connection))
        loop.models |= {name: ServedModel(name, llm) for name, (llm, _) in models.items()}
        loop.run()
    except ConnectionEnded:
        os._exit(0)  # the server has ended
