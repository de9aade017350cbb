"""Arrival processes of requests: closed loop, and Poisson arrivals in an open loop."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from outpace.benchmark.client import RequestBody

SendRequest = Callable[[RequestBody], Coroutine[Any, Any, None]]

MAX_STREAMS = 10_000
"""Maximum concurrent streams of one client."""


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """A closed loop: concurrent streams, each sending its next request after the last answer."""

    concurrency: int
    name: ClassVar[str] = "concurrency"

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= MAX_STREAMS:
            raise ValueError(f"concurrency must be 1 to {MAX_STREAMS}, got {self.concurrency}")

    @property
    def value(self) -> float:
        """Number of streams."""
        return self.concurrency

    async def send_all(self, bodies: Iterable[RequestBody], ask: SendRequest) -> None:
        """Send all requests with `ask`."""
        rest = iter(bodies)

        async def run_stream() -> None:
            for body in rest:
                await ask(body)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(run_stream())


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Poisson arrivals: an open loop with a mean rate of requests per second."""

    rate: float
    seed: int = 0
    name: ClassVar[str] = "rate"

    def __post_init__(self) -> None:
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise ValueError(f"rate must be a finite number above 0, got {self.rate}")

    @property
    def value(self) -> float:
        """Requests per second."""
        return self.rate

    async def send_all(self, bodies: Iterable[RequestBody], ask: SendRequest) -> None:
        """Send all requests with `ask`."""
        loop, chance = asyncio.get_running_loop(), random.Random(self.seed)
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            for body in bodies:
                due += chance.expovariate(self.rate)
                await asyncio.sleep(due - loop.time())
                group.create_task(ask(body))


Arrivals = ClosedLoop | Poisson
