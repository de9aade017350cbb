"""Load test: levels of load on a server, measured one after the other."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter as clock
from typing import Any, ClassVar

from outpace.api.chat_template import Message
from outpace.data.prompt_set import read_prompt_file
from outpace.errors import OptionError
from outpace.lab.client import Client, RequestBody, explain_error
from outpace.lab.load_figures import LoadFigures, RequestRecord, compute_figures
from outpace.lab.run import questions_of

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
            raise OptionError("concurrency", self.concurrency, f"must be 1 to {MAX_STREAMS}")

    @property
    def value(self) -> float:
        return self.concurrency

    async def send_all(self, bodies: Iterable[RequestBody], ask: SendRequest) -> None:
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
            raise OptionError("rate", self.rate, "must be a finite number above 0")

    @property
    def value(self) -> float:
        return self.rate

    async def send_all(self, bodies: Iterable[RequestBody], ask: SendRequest) -> None:
        loop, chance = asyncio.get_running_loop(), random.Random(self.seed)
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            for body in bodies:
                due += chance.expovariate(self.rate)
                await asyncio.sleep(due - loop.time())
                group.create_task(ask(body))


Arrivals = ClosedLoop | Poisson


WorkloadPrompt = str | list[Message]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """An endless sequence of requests that cycles through the prompts.

    `fields` are fields of every request, such as `max_tokens` and `outpace`. Request n has the
    seed `seed + n`.
    """

    model: str
    prompts: Sequence[WorkloadPrompt]
    seed: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = True

    def request_bodies(self, first: int, count: int) -> Iterator[RequestBody]:
        return map(self.request_body, range(first, first + count))

    def request_body(self, number: int) -> RequestBody:
        prompt = self.prompts[number % len(self.prompts)]
        body = {"model": self.model, "seed": self.seed + number, **self.fields}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        user = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {**body, "messages": user}


MAX_PROBLEMS = 4096
"""Maximum number of generated story problems."""


def load_prompts(path: Path | None, count: int, seed: int) -> list[WorkloadPrompt]:
    """Load and shuffle the prompts of a file, or `count` held-out story problems without one."""
    prompts: list[WorkloadPrompt]
    if path is None:
        prompts = [
            str(question.prompt) for question in questions_of("story", min(count, MAX_PROBLEMS))
        ]
    else:
        prompts = read_prompt_file(path)
    random.Random(seed).shuffle(prompts)
    return prompts


@dataclass(slots=True, kw_only=True)
class LoadLevel:
    """One level of load and its results so far."""

    arrivals: Arrivals
    requests: int
    records: list[RequestRecord] = field(default_factory=list)
    sent: int = 0
    tokens: int = 0
    """Output tokens of complete answers."""
    failed: int = 0
    seconds: float = 0.0
    """Time from the first request to the last answer."""
    cpu: float = 0.0
    """CPU seconds of this process in that time, to detect a client that is too slow."""

    async def run_requests(
        self, client: Client, bodies: Iterable[RequestBody], progress: Callable[[LoadLevel], None]
    ) -> None:
        began, cpu = clock(), time.process_time()

        async def send_and_record(body: RequestBody) -> None:
            self.sent += 1
            record = await client.send_request(body)
            self.records.append(record)
            self.tokens += (record.error is None and record.tokens) or 0
            self.failed += record.error is not None
            self.seconds, self.cpu = clock() - began, time.process_time() - cpu
            progress(self)

        await self.arrivals.send_all(bodies, send_and_record)

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


def check_response(record: RequestRecord, workload: Workload) -> None:
    """Raise `ValueError` if a request failed, or its answer does not report its tokens."""
    if record.error is not None:
        reason = explain_error(record.error, record.error_message)
        raise ValueError(f"model {workload.model!r} did not answer: {reason}")
    if record.tokens is None:
        raise ValueError(
            "the server does not report the number of streamed tokens; it must support "
            "stream_options.include_usage"
        )
