"""The process that decodes, as the server sees it: its start, its news, its end."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from outpace.api.text import Text
from outpace.api.worker import WorkerDied
from outpace.checkpoints.load import load_tokenizer
from outpace.server.channel import Channel, get, put
from outpace.server.models import Known, Model
from outpace.server.plant import PULSE, Engines, Look, News, Order
from outpace.server.remote import Remote, RemoteAnswer

SILENCE = 10
"""Signs of life that may fail to come before the silence counts as a step that does not end."""

CODE = """
import sys
sys.path[:] = {path!r}
from outpace.server.parent import follow
follow()
from outpace.server.plant import main
main({number})
"""
"""What the process runs. It finds modules where this one does, and nowhere else."""


class Child:
    """A process that has loaded all models of an order, and decodes; raises `ValueError` where it
    cannot.

    Attributes:
        hand: answers to requests that are not over, by their numbers.
        engines: what they held when somebody last wanted to know; nothing before.
        silent: for how long nothing was heard, in seconds that this process was there to listen.
        error: what ended it, if anything did.
    """

    def __init__(self, order: Order, max_waiting: int) -> None:
        self.hand: dict[int, RemoteAnswer] = {}
        self.engines: Engines = {name: (0, []) for name in order.models}
        self.silent = 0.0
        self.error: BaseException | None = None
        self.closed = False
        self.numbers = count()
        self.looking: list[asyncio.Future[None]] = []
        self.channel = Channel(self.take, self.lost)
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = started(theirs.fileno())
        try:
            self.models = self.load(order, max_waiting)
        except BaseException:
            self.close()
            raise

    def load(self, order: Order, max_waiting: int) -> dict[str, Model]:
        """Wait until it has loaded all models, for each of which so many requests may wait."""
        try:
            put(self.socket, order)
            told = get(self.socket)
        except (EOFError, ConnectionError):
            raise ValueError(f"the models cannot be loaded: {self.ending()}") from None
        if isinstance(told, ValueError):
            raise told
        loaded: Mapping[str, Known] = told
        models = {}
        for name, entry in order.models.items():
            text = Text(loaded[name].place, load_tokenizer(entry.path))
            text.limit(loaded[name].config.max_length)
            engine = Remote(self, name, text, entry.max_sequences + max_waiting)
            models[name] = Model(
                name=name, entry=entry, engine=engine, text=text, **vars(loaded[name])
            )
        return models

    async def join(self) -> None:
        """Hear of it from now on, in the loop that runs."""
        await self.channel.join(self.socket)
        self.listen(asyncio.get_running_loop())

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count how long nothing was heard; while this process itself stood still does not."""
        if self.alive:
            self.silent += PULSE
            loop.call_later(PULSE, self.listen, loop)

    async def measure(self) -> None:
        """Find out what its engines hold now; where it does not answer, that is as it was."""
        if not self.looking:
            self.send(Look())
        looked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.looking.append(looked)
        await asyncio.wait([looked], timeout=SILENCE * PULSE)

    @property
    def alive(self) -> bool:
        """Whether it goes on decoding."""
        return self.error is None and not self.closed

    @property
    def heartbeat(self) -> float:
        """When the step began that it is silent about; 0 where it is heard of."""
        return time.monotonic() - self.silent if self.silent > SILENCE * PULSE else 0.0

    def number(self) -> int:
        """A number for the next request."""
        return next(self.numbers)

    def send(self, asked: Any) -> None:
        """Tell it something, if it is there."""
        if self.alive:
            self.channel.send(asked)

    def take(self, told: Iterable[News | Engines]) -> None:
        """Pass on what it tells."""
        self.silent = 0.0
        for each in told:
            if isinstance(each, dict):
                self.looked(each)
            elif (answer := self.hand.get(each.number)) is not None:
                answer.take(each)

    def looked(self, engines: Engines) -> None:
        """Let those go on who wanted to look."""
        self.engines = engines
        waiting, self.looking = self.looking, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    def lost(self) -> None:
        """It has ended."""
        if self.alive:
            self.fail(self.ending())

    def fail(self, message: str) -> None:
        """Nothing goes on."""
        self.error = self.error or WorkerDied(message)
        for answer in list(self.hand.values()):
            answer.fail(WorkerDied(message))

    def check(self) -> None:
        """Raise `WorkerDied` where it decodes no more."""
        if not self.alive:
            raise WorkerDied(str(self.error or "the process that decodes was ended"))

    def ending(self) -> str:
        """How it has ended."""
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
        """End it; it has nothing to save."""
        self.closed = True
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.socket.close()


def started(number: int) -> subprocess.Popen[bytes]:
    """A process that holds this end of a channel, and hears no signal that is meant for the server.

    Ctrl-C goes to all processes of a terminal, but what is in hand is to be finished first.
    """
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        code = CODE.format(path=sys.path, number=number)
        command = [sys.executable, "-c", code]
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ours)
