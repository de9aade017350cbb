"""Load test: levels of load on a server, measured one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter as clock

from outpace.benchmark.arrivals import Arrivals
from outpace.benchmark.client import Body, Client, explain
from outpace.benchmark.exchange import Exchange
from outpace.benchmark.load_figures import Figures, figures
from outpace.benchmark.workload import Workload


@dataclass(slots=True, kw_only=True)
class Level:
    """One level of load and its results so far.

    Attributes:
        arrivals: arrival process of the requests.
        requests: number of requests.
        records: records of finished requests.
        sent: number of requests sent.
        tokens: output tokens of complete answers.
        failed: number of failed requests.
        seconds: time from the first request to the last answer.
        cpu: CPU seconds of this process in that time, to detect a client that is too slow.
        done: whether all requests have finished.
    """

    arrivals: Arrivals
    requests: int
    exchanges: list[Exchange] = field(default_factory=list)
    sent: int = 0
    tokens: int = 0
    failed: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    done: bool = False

    async def run(
        self, client: Client, bodies: Iterable[Body], progress: Callable[[Level], None]
    ) -> None:
        """Send all requests; `progress` is called after each answer."""
        began, cpu = clock(), time.process_time()

        async def ask(body: Body) -> None:
            self.sent += 1
            exchange = await client.ask(body)
            self.exchanges.append(exchange)
            self.tokens += (exchange.error is None and exchange.tokens) or 0
            self.failed += exchange.error is not None
            self.seconds, self.cpu = clock() - began, time.process_time() - cpu
            progress(self)

        await self.arrivals.send(bodies, ask)
        self.done = True

    def summary(self, limits: Mapping[str, float]) -> Figures:
        """Return the figures in the format of the JSON output."""
        return {
            self.arrivals.name: self.arrivals.value,
            **figures(self.exchanges, self.seconds, limits),
            "unfinished": self.sent - len(self.exchanges),
            "client_cpu_share": round(self.cpu / self.seconds, 3) if self.seconds else None,
        }


async def measure(
    client: Client,
    workload: Workload,
    levels: Sequence[Level],
    *,
    warmup: int,
    progress: Callable[[Level], None] = lambda level: None,
) -> None:
    """Measure the levels in place, each after `warmup` requests that are not counted.

    Prompts are repeated only after all have been sent.

    Raises:
        ValueError: a first, uncounted request has no measurable answer; nothing else is sent.
    """
    check(await client.ask(workload.request(0)), workload)
    number = 1
    for level in levels:
        warm = Level(arrivals=level.arrivals, requests=warmup)
        await warm.run(client, workload.requests(number, warmup), lambda level: None)
        number += warmup
        await level.run(client, workload.requests(number, level.requests), progress)
        number += level.requests


def requests_of(levels: Sequence[Level], warmup: int) -> int:
    """Return the number of requests that `measure_levels` sends."""
    return 1 + sum(warmup + level.requests for level in levels)


def check(exchange: Exchange, workload: Workload) -> None:
    """Raise `ValueError` if a request failed, or its answer does not report its tokens."""
    if exchange.error is not None:
        raise ValueError(f"model {workload.model!r} did not answer: {explain_of(exchange)}")
    if exchange.tokens is None:
        raise ValueError(
            "the server does not report the number of streamed tokens; it must support "
            "stream_options.include_usage"
        )


def explain_of(exchange: Exchange) -> str:
    """Explain a failed request in one line."""
    return explain(exchange.error or "", exchange.says)
