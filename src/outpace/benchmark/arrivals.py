"""Arrival processes of requests: closed loop, and Poisson arrivals in an open loop."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from outpace.benchmark.client import Body

Ask = Callable[[Body], Coroutine[Any, Any, None]]

MOST = 10_000
"""Maximum concurrent streams of one client."""


@dataclass(frozen=True, kw_only=True)
class Closed:
    """A closed loop: concurrent streams, each sending its next request after the last answer."""

    concurrency: int
    name: ClassVar[str] = "concurrency"

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= MOST:
            raise ValueError(f"concurrency must be 1 to {MOST}, got {self.concurrency}")

    @property
    def value(self) -> float:
        """Number of streams."""
        return self.concurrency

    async def send(self, bodies: Iterable[Body], ask: Ask) -> None:
        """Send all requests with `ask`."""
        rest = iter(bodies)

        async def stream() -> None:
            for body in rest:
                await ask(body)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(stream())


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

    async def send(self, bodies: Iterable[Body], ask: Ask) -> None:
        """Send all requests with `ask`."""
        loop, chance = asyncio.get_running_loop(), random.Random(self.seed)
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            for body in bodies:
                due += chance.expovariate(self.rate)
                await asyncio.sleep(due - loop.time())
                group.create_task(ask(body))


Arrivals = Closed | Poisson
