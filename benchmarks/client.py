"""A client of `outpace serve` that records when text arrives, and two ways to send requests."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter as clock
from typing import Any

from aiohttp import ClientConnectorError, ClientError, ClientSession, ClientTimeout, TCPConnector

RequestBody = Mapping[str, Any]
"""Body of a request to `/v1/chat/completions`."""

KEEPALIVE_SECONDS = 2.0
"""Seconds that an unused connection is kept: fewer than the server does (uvicorn 5), so that the
server does not close it while a request is being sent."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A request and its answer; times are seconds of one clock."""

    began: float
    ended: float = 0.0
    events: list[float] = field(default_factory=list)
    """Times at which text arrived."""
    text: str = ""
    tokens: int = 0
    """Output tokens, if the server reports them."""
    error: str | None = None
    """None for a complete answer; otherwise an HTTP status, `unreachable`, `dropped` (the
    connection ended before the answer), `timeout` or `failed` (an error event in the stream)."""
    error_message: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; None if there is no text."""
        return self.events[0] - self.began if self.events else None

    @property
    def e2e(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended - self.began

    def add_text(self, chunk: Mapping[str, Any]) -> None:
        """Add the text and the counts of a chunk or of a complete answer."""
        for choice in chunk["choices"]:
            if text := choice.get("delta", choice.get("message")).get("content"):
                self.events.append(clock())
                self.text += text
        self.tokens = (chunk.get("usage") or {}).get("completion_tokens", self.tokens)


class RequestError(Exception):
    """A failed request: the kind of error, and the server's message."""


class Client:
    """Connections to one server; an async context manager."""

    def __init__(self, url: str, *, timeout: float) -> None:
        """Open no connection yet; `timeout` limits the seconds of a complete answer."""
        self.url, self.timeout = url, timeout

    async def __aenter__(self) -> Client:
        self.session = ClientSession(
            connector=TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            timeout=ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.close()

    async def send_request(self, body: RequestBody) -> RequestRecord:
        """Send a request and read its answer; errors are recorded, never raised."""
        record = RequestRecord(began=clock())
        try:
            async with asyncio.timeout(self.timeout):
                await self.read_answer(body, record)
        except RequestError as error:
            record.error, record.error_message = error.args
        except TimeoutError:
            record.error = "timeout"
        except ClientConnectorError as error:
            record.error, record.error_message = "unreachable", str(error)
        except (ClientError, OSError) as error:
            record.error, record.error_message = "dropped", str(error)
        record.ended = clock()
        return record

    async def read_answer(self, body: RequestBody, record: RequestRecord) -> None:
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise RequestError(str(response.status), await response.text())
            if not body.get("stream"):
                record.add_text(await response.json())
                return
            async for line in response.content:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if data and line.startswith(b"data:"):
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise RequestError("failed", str(chunk["error"]))
                    record.add_text(chunk)
        raise RequestError("dropped", "the stream ended without [DONE]")


SendRequest = Callable[[RequestBody], Coroutine[Any, Any, None]]


async def send_in_streams(bodies: Iterable[RequestBody], send: SendRequest, streams: int) -> None:
    """Send each request of a stream after the answer of the last one: a closed loop."""
    rest = iter(bodies)

    async def run_stream() -> None:
        for body in rest:
            await send(body)

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(run_stream())


async def send_at_random(bodies: Iterable[RequestBody], send: SendRequest, rate: float) -> None:
    """Send requests at random times (Poisson), `rate` per second: an open loop."""
    loop, chance = asyncio.get_running_loop(), random.Random(0)
    due = loop.time()
    async with asyncio.TaskGroup() as group:
        for body in bodies:
            due += chance.expovariate(rate)
            await asyncio.sleep(due - loop.time())
            group.create_task(send(body))
