"""The process that loads the models of a server and decodes: its start, its loop, its end."""

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
"""Signs of life that may fail to come before the silence counts as a step that does not end."""

CODE = """
import sys
sys.path[:] = {path!r}
from outpace.server.parent import follow
follow()
from outpace.server.engine_process import main
main({number})
"""
"""What the process runs. It finds modules where this one does, and nowhere else."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """All models that the process shall load; where they are small, one thread is fastest."""

    models: Mapping[str, Entry]
    small: bool
    verbose: bool = False


class EngineProcess(EngineClient, asyncio.Protocol):
    """An engine loop in another process, for one event loop.

    Raises `ValueError` where that process cannot load the models of an order.

    Attributes:
        known, texts: what it has loaded and their tokenizers, by the names of models.
        measured: what the engines held when that was last asked.
        silent: for how long nothing was received, in seconds that this process was there to listen.
    """

    CLOSED = "the process that decodes was ended"

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.measured: Mapping[str, Stats] = {}
        self.silent = 0.0
        self.answered = asyncio.Event()
        self.inbox = Inbox()
        self.transport: asyncio.Transport
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = started(theirs.fileno())
        try:
            self.known = self.load(order)
            self.texts = {name: self.text(name, entry) for name, entry in order.models.items()}
        except BaseException:
            self.close()
            raise

    def load(self, order: Order) -> Mapping[str, Known]:
        """Wait until it has loaded all models."""
        try:
            put(self.socket, order)
            loaded = get(self.socket)
        except ConnectionEnded:
            raise ValueError(f"the models cannot be loaded: {self.ending()}") from None
        if isinstance(loaded, ValueError):
            raise loaded
        return cast(Mapping[str, Known], loaded)

    def text(self, name: str, entry: Entry) -> Text:
        """The tokenizer of one of its models, since prompts become token ids here."""
        text = Text(self.known[name].place, load_tokenizer(entry.path))
        text.limit(self.known[name].config.max_length)
        return text

    async def join(self) -> None:
        """Receive messages from now on, in the event loop that runs."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, sock=self.socket)
        self.listen(loop)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way out."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are of a separate type

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count how long nothing was received, but for time in which this process stood still."""
        if self.alive:
            self.silent += PULSE
            loop.call_later(PULSE, self.listen, loop)

    @property
    def heartbeat(self) -> float:
        """When the step began that it is silent about; 0 where it sends signs of life."""
        return time.monotonic() - self.silent if self.silent > SILENCE * PULSE else 0.0

    @property
    def stats(self) -> Mapping[str, Stats]:
        """Requests and memory of the engines when they were measured."""
        return self.measured

    async def measure(self) -> None:
        """Bring `stats` up to date; where the process does not answer, they stay."""
        self.answered.clear()
        self.send(Inspect())
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENCE * PULSE):
                await self.answered.wait()

    def send(self, command: Command) -> None:
        """Send a command, if the process is there."""
        try:
            if self.alive:
                self.transport.write(packed(command))
        except RecursionError:
            message = f"schema: it is too large: it is nested more than {DEEPEST} deep"
            raise OptionError("schema", None, message) from None

    def data_received(self, data: bytes) -> None:
        """Pass on whole messages."""
        self.silent = 0.0
        for messages in self.inbox.take(data):
            for message in map(decoded, messages):
                if isinstance(message, dict):
                    self.measured = message
                    self.answered.set()
                elif (request := self.requests.get(message.number)) is not None:
                    request.receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all requests where the process has ended unasked."""
        if self.alive:
            self.error = EngineDied(self.ending())
            self.fail()

    def ending(self) -> str:
        """How the process has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        status = self.process.returncode
        if status is not None and status < 0:
            how = f"by {signal.Signals(-status).name}"
            how += ", as where memory is short" if status == -signal.SIGKILL else ""
        else:
            how = f"with status {status}"
        return f"the process that decodes has ended {how}"

    def close(self) -> None:
        """End the process, which has nothing to save."""
        self.closed = True
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.socket.close()


def started(number: int) -> subprocess.Popen[bytes]:
    """A process that holds this end of a connection, and gets no signal meant for the server.

    Ctrl-C goes to all processes of a terminal, but requests in hand are to be finished first.
    """
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        code = CODE.format(path=sys.path, number=number)
        command = [sys.executable, "-c", code]
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ours)


def main(descriptor: int) -> None:
    """Load what the server orders, and decode for it until it ends."""
    own = socket.socket(fileno=descriptor)
    try:
        order: Order = get(own)
        start_log(verbose=order.verbose)
        if order.small:
            torch.set_num_threads(1)  # before layouts are tried
        try:
            models = load_all(order.models)
        except ValueError as error:
            put(own, plain(error))
            return
        put(own, {name: known for name, (_, known) in models.items()})
        gc.collect()
        gc.freeze()  # a collection of all that was loaded would stop every stream
        loop = EngineLoop(EngineConnection(own))
        loop.models |= {name: ServedModel(name, llm) for name, (llm, _) in models.items()}
        loop.run()
    except ConnectionEnded:
        os._exit(0)  # no client waits any more
