"""Load test: levels of load on a server, measured one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter as clock

from outpace.benchmark.arrivals import Arrivals
from outpace.benchmark.client import Client, RequestBody, explain_error
from outpace.benchmark.load_figures import LoadFigures, compute_figures
from outpace.benchmark.request_record import RequestRecord
from outpace.benchmark.workload import Workload


@dataclass(slots=True, kw_only=True)
class LoadLevel:
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
    records: list[RequestRecord] = field(default_factory=list)
    sent: int = 0
    tokens: int = 0
    failed: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    done: bool = False

    async def run_requests(
        self, client: Client, bodies: Iterable[RequestBody], progress: Callable[[LoadLevel], None]
    ) -> None:
        """Send all requests; `progress` is called after each answer."""
        began, cpu = clock(), time.process_time()

        async def send_and_record(body: RequestBody) -> None:
            self.sent += 1
            exchange = await client.send_request(body)
            self.records.append(exchange)
            self.tokens += (exchange.error is None and exchange.tokens) or 0
            self.failed += exchange.error is not None
            self.seconds, self.cpu = clock() - began, time.process_time() - cpu
            progress(self)

        await self.arrivals.send_all(bodies, send_and_record)
        self.done = True

    def summarise(self, limits: Mapping[str, float]) -> LoadFigures:
        """Return the figures in the format of the JSON output."""
        return {
            self.arrivals.name: self.arrivals.value,
            **compute_figures(self.records, self.seconds, limits),
            "unfinished": self.sent - len(self.records),
            "client_cpu_share": round(self.cpu / self.seconds, 3) if self.seconds else None,
        }


async def measure_levels(
    client: Client,
    workload: Workload,
    levels: Sequence[LoadLevel],
    *,
    warmup: int,
    progress: Callable[[LoadLevel], None] = lambda level: None,
) -> None:
    """Measure the levels in place, each after `warmup` requests that are not counted.

    Prompts are repeated only after all have been sent.

    Raises:
        ValueError: a first, uncounted request has no measurable answer; nothing else is sent.
    """
    check_response(await client.send_request(workload.request_body(0)), workload)
    number = 1
    for level in levels:
        warm = LoadLevel(arrivals=level.arrivals, requests=warmup)
        await warm.run_requests(client, workload.request_bodies(number, warmup), lambda level: None)
        number += warmup
        await level.run_requests(client, workload.request_bodies(number, level.requests), progress)
        number += level.requests


def count_requests(levels: Sequence[LoadLevel], warmup: int) -> int:
    """Return the number of requests that `measure_levels` sends."""
    return 1 + sum(warmup + level.requests for level in levels)


def check_response(exchange: RequestRecord, workload: Workload) -> None:
    """Raise `ValueError` if a request failed, or its answer does not report its tokens."""
    if exchange.error is not None:
        raise ValueError(f"model {workload.model!r} did not answer: {explain_failure(exchange)}")
    if exchange.tokens is None:
        raise ValueError(
            "the server does not report the number of streamed tokens; it must support "
            "stream_options.include_usage"
        )


def explain_failure(exchange: RequestRecord) -> str:
    """Explain a failed request in one line."""
    return explain_error(exchange.error or "", exchange.error_message)
