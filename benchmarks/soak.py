"""A server under a steady load for a long time: memory, latency, pages."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median

import matplotlib
import numpy as np

from client import Client, RequestBody
from harness import Bar, Row
from served import Served, capacity, lost, pages, served, tasks

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LOAD = 0.8
"""Share of the measured capacity."""

WINDOWS = 6
"""Of a run, of equal length: in the first it settles, and the second and the last are compared."""

CACHE = 0.02
"""GiB of each cache, so that the pages of the first window fill it: an untouched page takes no
memory, and looked like a leak when it is used at last."""

PROMPTS = 500
"""Prompts that take turns."""

FLAT, STEADY = 1.02, 1.15
"""What memory and latency may have become, as a multiple."""

KINDS = {"answer": 70, "stop": 10, "cancel": 10, "bad": 10}
"""Percent of the requests; of `cancel` the client leaves, and `bad` has to be refused."""

BAD: list[dict[str, object]] = [
    {"model": "nobody"},
    {"messages": []},
    {"messages": "x" * 100_000},
    {"temperature": -1},
    {"top_p": "much"},
    {"max_tokens": 10**9},
    {"n": 1000},
    {"outpace": {"method": "nonsense"}},
    {"outpace": {"options": {"nonsense": 1}}},
    {"no_such_field": 1},
]
"""Fields that a server must refuse, each in its turn."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to come: its number in its window, its second of the run, what is sent."""

    number: int
    due: float
    kind: str
    body: RequestBody
    patience: float | None


@dataclass(slots=True)
class Entry:
    """One request: when it was sent and ended, in seconds of the run, and what became of it."""

    kind: str
    sent: float
    ended: float
    first: float | None
    fault: str | None


def plan(rate: float, seconds: float) -> Iterator[Planned]:
    """Requests at random times, the same in every window of so many seconds."""
    for window in range(WINDOWS):
        chance, given, nonsense = random.Random(0), cycle(tasks(PROMPTS)), cycle(BAD)
        due, number = window * seconds + chance.expovariate(rate), 0
        while due < (window + 1) * seconds:
            (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
            body = {**next(given).body(stream=number % 3 > 0), "seed": number}
            if kind == "stop":
                body["stop"] = [". ", "####"]
            if kind == "bad":
                body |= next(nonsense)
            patience = chance.uniform(0, 2) if kind == "cancel" else None
            yield Planned(number, due, kind, body, patience)
            due, number = due + chance.expovariate(rate), number + 1


@dataclass(slots=True)
class Soak:
    """A run."""

    server: Served
    minutes: float
    entries: list[Entry] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.began

    async def send(self, client: Client, rate: float) -> None:
        """All requests at their times; returns when all are answered."""
        async with asyncio.TaskGroup() as group:
            for planned in plan(rate, 60 * self.minutes / WINDOWS):
                await asyncio.sleep(planned.due - self.now)
                group.create_task(self.ask(client, planned))

    async def ask(self, client: Client, planned: Planned) -> None:
        """One request, and whether what came was due to its kind."""
        kind, sent = planned.kind, self.now
        try:
            async with asyncio.timeout(planned.patience):
                exchange = await client.send_request(planned.body)
        except TimeoutError:
            self.entries.append(Entry(kind, sent, self.now, None, None))
            return
        fault = exchange.error
        if kind == "bad":
            fault = None if fault in ("400", "404") else f"{fault or 200} for nonsense"
        elif fault is None and exchange.text != self.texts.setdefault(
            planned.number, exchange.text
        ):
            fault = "another text than the first time"
        self.entries.append(Entry(kind, sent, self.now, exchange.ttft, fault))

    async def watch(self, client: Client) -> None:
        """A row for each minute, or for a twelfth of a run that is shorter."""
        tick = min(60.0, 60 * self.minutes / 12)
        while True:
            await asyncio.sleep(tick - self.now % tick)
            self.rows.append(await self.row(client, tick))
            print("  ".join(f"{key} {value:.5g}" for key, value in self.rows[-1].items()))

    async def row(self, client: Client, tick: float) -> Row:
        """What has ended since the row before."""
        last = [entry for entry in self.entries if entry.ended > self.now - tick]
        return {
            "minute": self.now / 60,
            "memory MiB": self.server.memory,
            "pages": await pages(client),
            "requests": len(last),
            **{f"E2E p{p} ms": percentile(last, p) for p in (50, 99)},
            "first text p99 ms": percentile([e for e in last if e.first], 99, first=True),
            "faults": sum(entry.fault is not None for entry in last),
        }

    def window(self, number: int) -> list[Entry]:
        """Whole answers of a window."""
        seconds = 60 * self.minutes / WINDOWS
        answers = (entry for entry in self.entries if entry.kind == "answer")
        return [entry for entry in answers if entry.sent // seconds == number]

    def bars(self, held: float) -> list[Bar]:
        """What must hold."""
        early, late = self.window(1), self.window(WINDOWS - 1)
        settled = [r["memory MiB"] for r in self.rows if r["minute"] >= self.minutes / WINDOWS]
        growth = median(settled[-5:]) / settled[0]
        faults = sum(entry.fault is not None for entry in self.entries)
        bars = [
            Bar(what="soak: memory at the end over settled memory", value=growth, limit=FLAT),
            Bar(what="soak: pages lost", value=held, limit=0),
            Bar(what="soak: requests that went wrong", value=faults, limit=0),
        ]
        for p in (50, 99):
            what = f"soak: E2E p{p} of the last window over that of the second"
            value = percentile(late, p) / max(percentile(early, p), 1.0)
            bars.append(Bar(what=what, value=value, limit=STEADY))
        return bars


def percentile(entries: Sequence[Entry], p: int, *, first: bool = False) -> float:
    """Milliseconds to the end or to the first text; 0 of nothing."""
    times = [(e.first or 0.0) if first else e.ended - e.sent for e in entries]
    return 1e3 * float(np.percentile(times, p)) if times else 0.0


def soak(options: argparse.Namespace) -> tuple[list[Row], list[Bar]]:
    """Measure the capacity, then load the server for so many minutes."""

    async def run(server: Served) -> tuple[list[Row], list[Bar]]:
        async with server.client() as client:
            most = [task.body() for task in tasks(2 * options.requests)]
            rate = LOAD * await capacity(client, most, 32) / (1 - KINDS["bad"] / 100)
            print(f"{rate:.2f} requests per second for {options.minutes:g} minutes")
            current = Soak(server, options.minutes)
            watching = asyncio.create_task(current.watch(client))
            await current.send(client, rate)
            watching.cancel()
            held = await lost(client)
        for fault in sorted({entry.fault for entry in current.entries if entry.fault}):
            print(f"fault: {fault}")
        if options.png is not None:
            draw(current.rows, options.png)
        return current.rows, current.bars(held)

    with served(cache_gib=CACHE) as server:
        return asyncio.run(run(server))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Memory and latency over time."""
    figure, (memory, latency) = plt.subplots(
        2, 1, figsize=(8, 5), sharex=True, layout="constrained"
    )
    minutes = [row["minute"] for row in rows]
    memory.plot(minutes, [row["memory MiB"] for row in rows], color="#2166ac")
    memory.set_ylabel("memory of the server, MiB")
    memory.set_ylim(0, 1.1 * max(row["memory MiB"] for row in rows))
    for p, style in ((50, "-"), (99, ":")):
        values = [row[f"E2E p{p} ms"] for row in rows]
        latency.plot(minutes, values, style, color="#d95f0e", label=f"whole answer, p{p}")
    latency.set_ylabel("milliseconds")
    latency.set_ylim(bottom=0)
    latency.set_xlabel("minutes")
    latency.legend(fontsize=8)
    for pane in (memory, latency):
        pane.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
