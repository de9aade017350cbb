"""When requests are sent: in an open loop at their own times, in a closed one after answers."""

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
"""Streams of one client."""


@dataclass(frozen=True, kw_only=True)
class Closed:
    """So many streams, each of which sends its next request when it has the last answer."""

    concurrency: int
    name: ClassVar[str] = "concurrency"

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= MOST:
            raise ValueError(f"concurrency must be 1 to {MOST}, not {self.concurrency}")

    @property
    def value(self) -> float:
        """How many."""
        return self.concurrency

    async def send(self, bodies: Iterable[Body], ask: Ask) -> None:
        """Ask for all of them."""
        rest = iter(bodies)

        async def stream() -> None:
            for body in rest:
                await ask(body)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(stream())


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """So many requests per second, at random times of their own, whatever the server does."""

    rate: float
    seed: int = 0
    name: ClassVar[str] = "rate"

    def __post_init__(self) -> None:
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise ValueError(f"rate must be a number of requests above 0, not {self.rate}")

    @property
    def value(self) -> float:
        """How many."""
        return self.rate

    async def send(self, bodies: Iterable[Body], ask: Ask) -> None:
        """Ask for all of them."""
        loop, chance = asyncio.get_running_loop(), random.Random(self.seed)
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            for body in bodies:
                due += chance.expovariate(self.rate)
                await asyncio.sleep(due - loop.time())
                group.create_task(ask(body))


Arrivals = Closed | Poisson
