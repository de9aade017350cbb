"""What the server costs and holds: overhead, equality, disconnects, overload and a long run.

    python benchmarks/serve.py --json benchmarks/results/serve.json --png docs/soak.png
    python benchmarks/serve.py overhead disconnects

`outpace serve` runs in a process of its own on a free port of this machine and serves the zoo.

- overhead: tokens per second at 32 streams, streamed and whole, of one method and of several
  methods of one model, against the engine alone in this process on the same prompts.
- equal: 64 streams over all methods, every other one sampled, against each of them alone.
- disconnects: 200 clients that leave at random moments among others that stay.
- overload: three times the requests per second that small queues can serve.
- soak: 80 % of the measured capacity over all methods, with cancels, stops and bad requests. Each
  sixth of the run has the same requests at the same moments, so that its answers must be the same
  and its latency can be compared. Caches are small, so that they are full when the first one ends.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import soak
from client import Client, RequestBody, RequestRecord, send_at_random
from curve import Point
from harness import Bar, Row, Timing, alternate, arguments, finish, prepare, ratio, save, show
from harness import median as median_of
from methods import POINTS
from outpace import LLM
from served import Served, Task, capacity, closed, expect, lost, pages, served, tasks

STREAMS = 32
OVERHEAD, REFUSAL = 0.10, 100.0
"""Share of the engine's throughput that HTTP and scheduling may cost; ms of a refusal."""

REFUSED = 0.3
"""Share of requests that must be refused, or it was no overload."""

CASES = {
    "tiny-ar, token by token": ("tiny-ar", ("autoregressive",)),
    "tiny-dream, left to right": ("tiny-dream", ("left to right",)),
    "tiny-dream, three methods": ("tiny-dream", ("left to right", "APD", "Fast-dLLM")),
}
"""Model and methods, by their names among the points, of each comparison."""

QUEUE = 4
"""Requests of each model that run, and that wait, where too much is asked."""

Result = tuple[list[Row], list[Bar]]


@dataclass(slots=True)
class Side:
    """One way to answer the same tasks, part after part, and what its answers were."""

    parts: Sequence[Sequence[Task]]
    answer: Callable[[Sequence[Task]], list[str]]
    cpu: Callable[[], float]
    texts: list[str] = field(default_factory=list)
    turn: int = 0

    def __call__(self) -> None:
        """Answer the next part."""
        self.texts += self.answer(self.parts[self.turn])
        self.turn += 1


def timed(side: Side) -> Timing:
    """Seconds of a part; CPU seconds are those of the engine process."""
    wall, cpu = time.perf_counter(), side.cpu()
    side()
    return Timing(side.cpu() - cpu, time.perf_counter() - wall)


def overhead(options: argparse.Namespace) -> Result:
    """Each case in turns: engine, streamed, whole."""
    rows, bars = [], []
    with served(prefix_cache=False) as server:  # streamed and whole have the same prompts
        for name, (model, kinds) in CASES.items():
            points = [p for p in POINTS if p.model == model and p.kind in kinds]
            for row in compared(server, points, options):
                rows.append({"case": name, **row})
                what = f"{name}, {row['way']}"
                over = f"{what}: HTTP and scheduling over the engine's throughput"
                bars.append(Bar(what=over, value=row["overhead"], limit=OVERHEAD))
                equal = f"{what}: share that equals the engine's"
                bars.append(Bar(what=equal, value=row["same texts"], limit=1.0, at_least=True))
    return rows, bars


def compared(server: Served, points: Sequence[Point], options: argparse.Namespace) -> list[Row]:
    """Throughput over HTTP and of the engine alone, both without a prefix cache."""
    count, rounds = options.requests, options.rounds
    given = tasks(count * (rounds + 1), points, sampled=False)
    parts = [given[begin : begin + count] for begin in range(0, len(given), count)]
    llm = LLM(points[0].model, points[0].method, prefix_cache=False)

    def alone(part: Sequence[Task]) -> list[str]:
        requests = ((task.prompt, task.options()) for task in part)
        outputs = dict(llm.serve(requests, batch=STREAMS))
        lengths.extend(len(output.ids) for output in outputs.values())
        return [outputs[number].text for number in range(len(part))]

    def over_http(part: Sequence[Task], stream: bool) -> list[str]:
        async def run() -> list[str]:
            async with server.client() as client:
                bodies = [task.body(stream) for task in part]
                return [expect(each).text for each in await closed(client, bodies, STREAMS)]

        return asyncio.run(run())

    lengths: list[int] = []
    sides = {
        "engine": Side(parts, alone, time.process_time),
        "streamed": Side(parts, lambda part: over_http(part, True), lambda: server.cpu),
        "whole": Side(parts, lambda part: over_http(part, False), lambda: server.cpu),
    }
    timings = alternate(sides, rounds, timed)
    tokens = sum(lengths[count:]) / rounds
    return [
        {
            "way": name,
            "requests": count,
            "streams": STREAMS,
            "engine, tokens per second": tokens / median_of(timings["engine"], "wall"),
            "tokens per second": tokens / median_of(timings[name], "wall"),
            "overhead": 1 - 1 / ratio(timings[name], timings["engine"], "wall"),
            "CPU ratio": ratio(timings[name], timings["engine"]),
            "same texts": same(sides[name].texts, sides["engine"].texts),
        }
        for name in ("streamed", "whole")
    ]


def same(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Share of texts that are equal."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def equal(options: argparse.Namespace) -> Result:
    """All methods together against each request alone."""

    async def run(server: Served) -> Result:
        async with server.client() as client:
            bodies = [task.body() for task in tasks(2 * options.streams)]
            alone = [expect(await client.send_request(body)).text for body in bodies]
            mixed = await closed(client, bodies, options.streams)
        share = same([expect(each).text for each in mixed], alone)
        row: Row = {"requests": len(bodies), "streams": options.streams, "same texts": share}
        what = f"{options.streams} streams over all methods: share that equals the request alone"
        return [row], [Bar(what=what, value=share, limit=1.0, at_least=True)]

    with served() as server:
        return asyncio.run(run(server))


def disconnects(options: argparse.Namespace) -> Result:
    """Clients that leave at random moments, streamed or not, among others that stay."""

    async def run(server: Served) -> Result:
        chance = random.Random(0)
        given = tasks(options.cuts + options.cuts // 2)
        cut = set(chance.sample(range(len(given)), options.cuts))
        bodies = [task.body(stream=number % 3 > 0) for number, task in enumerate(given)]
        async with server.client() as client:
            before = await pages(client)
            alone = {
                n: expect(await client.send_request(b))
                for n, b in enumerate(bodies)
                if n not in cut
            }
            usual = float(np.median([exchange.e2e for exchange in alone.values()]))
            moments = {number: chance.uniform(0, 2 * usual) for number in cut}
            texts, left = await leaving(client, bodies, moments)
            held = await lost(client) - before
        share = same([texts[number] for number in alone], [e.text for e in alone.values()])
        row: Row = {"cuts": len(cut), "left early": left, "stayed": len(alone)}
        row |= {"same texts": share, "pages lost": held}
        return [row], [
            Bar(what="disconnects: pages lost", value=held, limit=0),
            Bar(
                what="disconnects: those that stay equal alone", value=share, limit=1, at_least=True
            ),
        ]

    with served() as server:
        return asyncio.run(run(server))


async def leaving(
    client: Client, bodies: Sequence[RequestBody], moments: Mapping[int, float]
) -> tuple[dict[int, str], int]:
    """Texts by number of the requests whose clients stay, and how many others left in time."""
    texts: dict[int, str] = {}
    left = 0
    rest = iter(enumerate(bodies))

    async def stream() -> None:
        nonlocal left
        for number, body in rest:
            try:
                async with asyncio.timeout(moments.get(number)):
                    texts[number] = expect(await client.send_request(body)).text
            except TimeoutError:
                left += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(STREAMS):
            group.create_task(stream())
    return texts, left


def overload(options: argparse.Namespace) -> Result:
    """Three times what can be served, at random times, to a server with small queues."""

    async def run(server: Served) -> Result:
        exchanges: list[RequestRecord] = []
        async with server.client() as client:

            async def ask(body: RequestBody) -> None:
                exchanges.append(await client.send_request(body))

            least = [task.body() for task in tasks(options.requests)]
            served = await capacity(client, least, 2 * QUEUE)
            count = max(int(3 * served * options.seconds), 1)
            bodies = [task.body() for task in tasks(count)]
            await send_at_random(bodies, ask, 3 * served)
            held = await lost(client)
        kinds = Counter(exchange.error or "answered" for exchange in exchanges)
        refused = [1e3 * each.e2e for each in exchanges if each.error == "429"]
        ended = (kinds["answered"] + kinds["429"]) / count
        slow = float(np.percentile(refused or [0.0], 99))
        row: Row = {"capacity, requests per second": served, "sent": count, **kinds}
        row |= {"refusal p99 ms": slow, "pages lost": held}
        share = len(refused) / count
        return [row], [
            Bar(what="overload: share refused", value=share, limit=REFUSED, at_least=True),
            Bar(what="overload: refusal, p99 in ms", value=slow, limit=REFUSAL),
            Bar(what="overload: answered or refused", value=ended, limit=1, at_least=True),
        ]

    with served(QUEUE, max_sequences=QUEUE) as server:
        return asyncio.run(run(server))


PARTS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "overhead": overhead,
    "equal": equal,
    "disconnects": disconnects,
    "overload": overload,
    "soak": soak.soak,
}


def main() -> None:
    """Measure all parts, or some."""
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--requests", type=int, default=128, help="of a round (128)")
    parser.add_argument("--streams", type=int, default=64, help="that must equal (64)")
    parser.add_argument("--cuts", type=int, default=200, help="disconnects (200)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of overload (20)")
    parser.add_argument("--minutes", type=float, default=30.0, help="of the soak (30)")
    parser.add_argument("--png", type=Path, help="picture of the soak")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(unknown)}; known are {', '.join(PARTS)}")
    prepare(options)
    tables: dict[str, list[Row]] = {}
    bars: list[Bar] = []
    for name in options.parts or PARTS:
        tables[name], new = PARTS[name](options)
        bars += new
        show(name, tables[name])
        save(options, tables, bars)
    finish(options, tables, bars)


if __name__ == "__main__":
    main()
