"""A small HTTP server that does what a test wrote, at the times that the test wrote."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass
class Asked:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: Json
    time: float
    number: int


@dataclass
class Reply:
    """The connection that a script answers on; an answer is streamed in chunks."""

    writer: asyncio.StreamWriter
    dropped: bool = False
    ended: bool = False

    def start(self, kind: str = "text/event-stream") -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.writer.write(head.encode())

    def raw(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def event(self, *chunks: Json) -> None:
        self.raw(b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks))

    def text(self, *pieces: str) -> None:
        self.event(*({"choices": [{"index": 0, "delta": {"content": p}}]} for p in pieces))

    def finish(self, tokens: int, **outpace: int) -> None:
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        extra = {"outpace": outpace} if outpace else {}
        self.event({"choices": [], "usage": {"completion_tokens": tokens}, **extra})
        self.raw(b"data: [DONE]\n\n")

    def drop(self) -> None:
        self.writer.transport.abort()
        self.dropped = True

    def refuse(self, status: int, message: str) -> None:
        body = json.dumps({"error": {"message": message}}).encode()
        head = f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        self.ended = True

    def whole(self, body: Json) -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        self.writer.write(head.encode() + b"\r\n\r\n" + data)
        self.ended = True


@dataclass
class Clock:
    """A clock that stands still until a script moves it on.

    A script does so only when the client has looked at it since, so that no time depends on how
    busy the machine is.
    """

    now: float = 100.0
    looks: int = 0
    known: int = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.now

    async def wait(self, seconds: float) -> None:
        while self.looks == self.known:
            await asyncio.sleep(0.001)
        self.known = self.looks
        self.now += seconds


Script = Callable[[Asked, Reply], Awaitable[None]]


@dataclass
class ScriptedServer:
    """Runs in a thread of its own, between `with` and its end."""

    script: Script
    models: tuple[str, ...] = ("m",)
    asked: list[Asked] = field(default_factory=list)
    active: int = 0
    most: int = 0

    def __enter__(self) -> ScriptedServer:
        started = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)))
        self.thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, started: threading.Event) -> None:
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self.over.wait()
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, Reply(writer)):
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, reply: Reply) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:-2])
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        path = head[0].split()[1]
        if path.endswith("/models"):
            reply.whole({"data": [{"id": name} for name in self.models]})
            return True
        asked = Asked(path, headers, json.loads(data), time.perf_counter(), len(self.asked))
        self.asked.append(asked)
        self.active += 1
        self.most = max(self.most, self.active)
        await self.script(asked, reply)
        self.active -= 1
        if not (reply.dropped or reply.ended):
            reply.writer.write(b"0\r\n\r\n")
        return not reply.dropped
