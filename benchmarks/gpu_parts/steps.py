"""Steps of random models of published shapes: beside what memory allows, and with every method.

A *step* runs so many rows of each of some sequences, behind keys of theirs, and reads the token
that each row predicts: packing, launches, reads and the wait for them included. Its *floor* is the
time in which a copy moves the bytes that it has to read: weights, without an embedding of which
only rows are looked up, and keys and values of all sequences. A *cycle* of a method is one forward
of its target with all that belongs to it, as the engine runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from torch.profiler import ProfilerActivity, profile

from checkpoints import prompt
from gpu_parts.device import Card, Found, Setup, clear, timed, wait
from gpu_parts.shapes import CASES, IDS, TARGETS, Case, runners_for
from harness import Bar, Budget, Row
from outpace.decoding import CAUSAL, FULL, Forward, Kind
from outpace.engine.engine import Engine
from outpace.engine.job import Job
from outpace.engine.pack import ScheduledForward
from outpace.engine.pairing import Pairing
from outpace.engine.runner import Runner

FLOOR, SIXTEEN, OUTSIDE = 0.85, 1.10, 0.08
"""Floor over a step of one row, a step of 16 rows over it, and time outside kernels, as wanted."""

LOADED = 32
"""Requests at which the time outside kernels is judged."""

WARM, MOST = 2, 4.0
"""Cycles of each request in front of those that are timed, and seconds that these take at most."""

ROOM = 128
"""Slots of a request beyond its prompt and its answer: windows, trees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How much is run: `batches` of sequences, each with so many `rows` behind `keys`.

    Attributes:
        prefill: rows of a prompt that is computed at once.
        prompt, tokens: of the requests of methods.
        cycles: of each of them that are timed.
    """

    batches: tuple[int, ...]
    rows: tuple[int, ...]
    keys: int
    prefill: int
    prompt: int
    tokens: int
    cycles: int

    @property
    def slots(self) -> int:
        """Slots that the most sequences need."""
        each = max(self.keys + max(self.rows), self.prompt + self.tokens + ROOM)
        return max(max(self.batches) * (each + 16), self.prefill)


FULL_SIZES = Steps(
    batches=(1, 8, 32, 64),
    rows=(1, 16, 32),
    keys=1024,
    prefill=2048,
    prompt=128,
    tokens=256,
    cycles=12,
)
TINY_SIZES = Steps(
    batches=(1, 2), rows=(1, 16), keys=32, prefill=64, prompt=16, tokens=64, cycles=3
)


def forward(runner: Runner, rows: int, start: int, wanted: int) -> Forward:
    """So many rows from slot `start` on, of which the last ones predict the next token each."""
    end = start + rows
    return Forward(
        ids=prompt(rows, IDS, seed=rows),
        start=start,
        pattern=FULL if runner.config.kind is Kind.DIFFUSION else CAUSAL,
        predict=range(end - wanted + 1, end + 1),
        predict_from=range(end - wanted, end),
    )


def seconds(runner: Runner, batch: int, asked: Forward) -> float:
    """Median seconds of a step in which each of some sequences feeds the same."""
    tables = [table for _ in range(batch) if (table := runner.reserve(asked.end))]
    assert len(tables) == batch, "the cache is too small"
    for table in tables:
        table.written = asked.start
        runner.cache.extend(table, asked.end)

    def step() -> None:
        runner.run_pass(
            [ScheduledForward.from_forward(asked, table, runner.config) for table in tables]
        )

    taken = timed(step, rounds=5, calls=4)
    for table in tables:
        runner.release(table)
    return taken


def weights(runner: Runner, *, head: bool = True) -> int:
    """Numbers that a step multiplies with, those of the head included or not."""
    parts = dict(runner.model.named_parameters())
    if not (head and runner.config.tied):
        del parts["embedding.weight"]  # of which only single rows are read
    if not head:
        parts.pop("unembedding.weight", None)
    return sum(part.numel() for part in parts.values())


def moved(runner: Runner, batch: int, slots: int) -> int:
    """Bytes that a step reads at least, of sequences of so many slots each."""
    config = runner.config
    numbers = 2 * config.layers * config.kv_heads * config.head_dim * slots * batch
    return (weights(runner) + numbers) * runner.cache.memories[0].itemsize


def floors(name: str, runner: Runner, sizes: Steps, card: Card, budget: Budget) -> list[Row]:
    """Steps beside their floors, by batch and rows."""
    found = []
    for batch, rows in budget.spend(product(sizes.batches, sizes.rows)):
        taken = seconds(runner, batch, forward(runner, rows, sizes.keys, rows))
        size = moved(runner, batch, sizes.keys + rows)
        row: Row = {"shape": name, "batch": batch, "rows": rows, "keys": sizes.keys}
        row |= {"GB": size / 1e9, "floor ms": size / card.copied * 1e3, "step ms": taken * 1e3}
        found.append(row | {"share of the floor": size / card.copied / taken})
    return found


def floor_bars(rows: Sequence[Row]) -> list[Bar]:
    """What is wanted of a single sequence of Qwen3-8B."""
    single = {r["rows"]: r for r in rows if (r["shape"], r["batch"]) == ("Qwen3-8B", 1)}
    bars = []
    if 1 in single:
        what, value = "Qwen3-8B, a step of 1 row: share of the floor", "share of the floor"
        bars.append(Bar(what=what, value=single[1][value], limit=FLOOR, at_least=True))
    if {1, 16} <= single.keys():
        value = single[16]["step ms"] / single[1]["step ms"]
        bars.append(Bar(what="Qwen3-8B, a step of 16 rows over 1 row", value=value, limit=SIXTEEN))
    return bars


def prefill(name: str, runner: Runner, sizes: Steps, card: Card) -> Row:
    """A prompt that is computed at once, beside the products of its rows with the weights."""
    taken = seconds(runner, 1, forward(runner, sizes.prefill, 0, 1))
    needed = 2 * weights(runner, head=False) * sizes.prefill
    row: Row = {"shape": name, "rows": sizes.prefill, "ms": taken * 1e3}
    row["tokens/s"] = sizes.prefill / taken
    return row | {"share of the products' rate": needed / taken / card.multiplied}


def requests(engine: Engine, case: Case, pairing: Pairing, batch: int, sizes: Steps) -> list[Job]:
    """Requests that have begun."""
    jobs = [
        Job(
            method=case.method,
            pairing=pairing,
            prompt=prompt(sizes.prompt, IDS, seed),
            max_tokens=sizes.tokens,
        )
        for seed in range(batch)
    ]
    for job in jobs:
        engine.enqueue(engine.prepare_job(job))
    advance(engine, jobs, WARM)
    return jobs


def forwards(job: Job, begin: int = 0) -> int:
    """Forwards of the target in the trace of a request, from an entry on."""
    return sum(step.model == "target" for step in job.trace[begin:])


def advance(
    engine: Engine, jobs: Sequence[Job], count: int, most: float = inf
) -> tuple[int, float]:
    """Let requests go on by so many cycles, or seconds; forwards of the target, and seconds."""
    before, first = sum(map(forwards, jobs)), jobs[0]
    begin = len(first.trace)
    wait()
    began = time.perf_counter()
    # They take turns, so one tells of all.
    while forwards(first, begin) < count and time.perf_counter() - began < most and engine.step():
        pass
    wait()
    taken = time.perf_counter() - began
    assert all(job.error is None for job in jobs), first.error
    return sum(map(forwards, jobs)) - before, taken


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of the time some spans cover, those that overlap counted once."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, last), 0.0)
        last = max(last, end)
    return total


def busy(profiler: profile, kind: str) -> float:
    """Seconds in which a kind of device ran what was profiled: kernels, copies."""
    events = [event for event in profiler.events() if event.device_type.name == kind]
    return covered((each.time_range.start, each.time_range.end) for each in events) / 1e6


def outside(run: Callable[[], tuple[int, float]], each: float, device: str) -> float | None:
    """Share of a forward's seconds `each` in which the device is idle; None without a GPU.

    `run` makes some more of them under the profiler, which slows the host alone: so how long
    kernels and copies take is looked up there, and how long a forward takes was measured without.
    """
    if device != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        count, _ = run()
    return 1 - busy(profiler, "CUDA") / count / each


def cycle(case: Case, runners: dict[str, Runner], batch: int, sizes: Steps) -> Row:
    """Cycles of a method with so many requests."""
    engine, pairing = Engine(), Pairing.from_runners(runners)
    for runner in runners.values():
        engine.add_runner(runner)
    jobs = requests(engine, case, pairing, batch, sizes)
    count, taken = advance(engine, jobs, sizes.cycles, MOST)

    def more() -> tuple[int, float]:
        return advance(engine, jobs, max(sizes.cycles // 3, 1), MOST)

    share = outside(more, taken / count, runners["target"].device.type)
    for job in jobs:
        engine.cancel(job)
    row: Row = {"shape": case.target, "method": case.name, "batch": batch}
    row |= {"ms per cycle": taken / count * batch * 1e3, "forwards/s": count / taken}
    return row | {"time outside kernels": share}


def projected(case: Case, row: Row) -> Row:
    """What these cycles would bring if each kept what the paper says; no measurement."""
    assert case.published is not None and case.kept is not None
    return {
        "shape": case.target,
        "method": case.name,
        "batch": row["batch"],
        "published in": f"{case.published['place']}, GSM8K",
        "published tokens per forward": case.kept,
        "projected tokens/s": case.kept * row["forwards/s"],
    }


def cycles(name: str, target: Runner, sizes: Steps, setup: Setup) -> Iterator[tuple[Case, Row]]:
    """Every method of a target, by batch."""
    for case in (case for case in CASES if case.target == name):
        runners = runners_for(setup.where, target, case.method)
        for batch in setup.budget.spend(sizes.batches):
            yield case, cycle(case, runners, batch, sizes)
        del runners
        clear()


def cycle_bars(rows: Sequence[Row]) -> list[Bar]:
    """Time outside kernels with many requests, where it was measured."""
    return [
        Bar(
            what=f"{row['shape']}, {row['method']}, {LOADED} requests: time outside kernels",
            value=row["time outside kernels"],
            limit=OUTSIDE,
        )
        for row in rows
        if row["batch"] == LOADED and row["time outside kernels"] is not None
    ]


def measure(setup: Setup, sizes: Steps, name: str) -> Found:
    """One target, with all of its methods."""
    tables: dict[str, list[Row]] = {"steps": [], "prefill": [], "cycles": [], "projected": []}
    where, card = setup.where, setup.card
    for _ in setup.budget.spend([name]):
        target = where.runner(name, where.model(TARGETS[name]), sizes.slots)
        tables["steps"] = floors(name, target, sizes, card, setup.budget)
        tables["prefill"] = [prefill(name, target, sizes, card)]
        for case, row in cycles(name, target, sizes, setup):
            tables["cycles"].append(row)
            if case.kept is not None:
                tables["projected"].append(projected(case, row))
    return tables, [*floor_bars(tables["steps"]), *cycle_bars(tables["cycles"])]
