"""Measuring two programs beside each other, and writing down what came out.

The sides of a comparison take turns within one run, in alternating order, so that what disturbs
one disturbs the other as well; a ratio is the median of the ratios of the rounds. Times are CPU
seconds of the process (all threads) and wall seconds.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from outpace.provenance import provenance_record

Clock = Literal["cpu", "wall"]
Row = dict[str, Any]
Side = TypeVar("Side", bound=Callable[[], object])
Case = TypeVar("Case")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that one run took."""

    cpu: float
    wall: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A figure that a measurement has to reach."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the value is on the right side of the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class Budget:
    """Gives out cases until the time is over, and counts those that are left out."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.left_out = 0

    @property
    def left(self) -> float:
        """Seconds that are left, at least none."""
        return max(self.end - time.monotonic(), 0.0)

    def spend(self, cases: Iterable[Case]) -> Iterator[Case]:
        """The cases for which there is time."""
        for case in cases:
            if self.left:
                yield case
            else:
                self.left_out += 1


def arguments(
    doc: str | None, *, rounds: int | None, threads: int | None = 1
) -> argparse.ArgumentParser:
    """The options that every benchmark has; defaults are given."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"repetitions ({rounds})")
    parser.add_argument("--threads", type=int, default=threads, help=f"of torch ({threads})")
    parser.add_argument("--json", type=Path, help="file for the result")
    return parser


def prepare(options: argparse.Namespace) -> None:
    """Fix threads and seed."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)


def timed(run: Callable[[], object]) -> Timing:
    """Seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Timing(time.process_time() - cpu, time.perf_counter() - wall)


def alternate(
    sides: Mapping[str, Side], rounds: int, time_of: Callable[[Side], Timing] = timed
) -> dict[str, list[Timing]]:
    """Run the sides in turns, once to warm up and then `rounds` times in alternating order.

    Which one is first changes as well: it runs twice in a row, and so with its own data at hand.
    `time_of` runs a side and says how long it took.
    """
    for run in sides.values():
        run()
    gc.collect()
    gc.freeze()  # objects of one side must not slow down collections during the other
    timings: dict[str, list[Timing]] = {name: [] for name in sides}
    names = list(sides)
    for index in range(rounds):
        turn = index // 2 % len(names)
        order = [*names[turn:], *names[:turn]]
        for name in reversed(order) if index % 2 else order:
            timings[name].append(time_of(sides[name]))
    gc.unfreeze()
    return timings


def seconds(timing: Timing, clock: Clock) -> float:
    """One of the two times."""
    return timing.cpu if clock == "cpu" else timing.wall


def ratios(ours: Sequence[Timing], theirs: Sequence[Timing], clock: Clock) -> list[float]:
    """Ratio of each round."""
    return [seconds(a, clock) / seconds(b, clock) for a, b in zip(ours, theirs, strict=True)]


def median(timings: Sequence[Timing], clock: Clock = "cpu") -> float:
    """Median seconds."""
    return statistics.median(seconds(timing, clock) for timing in timings)


def ratio(ours: Sequence[Timing], theirs: Sequence[Timing], clock: Clock = "cpu") -> float:
    """Median of the ratios of the rounds."""
    return statistics.median(ratios(ours, theirs, clock))


def spread(ours: Sequence[Timing], theirs: Sequence[Timing], clock: Clock = "cpu") -> str:
    """Smallest and largest ratio of a round."""
    every = ratios(ours, theirs, clock)
    return f"{min(every):.2f}-{max(every):.2f}"


def costs(
    timings: Mapping[str, Sequence[Timing]], counts: Mapping[str, int], unit: str
) -> dict[str, Row]:
    """What a unit of work, of which each side did `counts`, cost it and over the first side."""
    first = next(iter(timings))
    rows = {}
    for name, runs in timings.items():
        scale = counts[first] / counts[name]
        rows[name] = {
            f"{unit}s": counts[name],
            f"CPU ms per {unit}": median(runs) / counts[name] * 1e3,
            f"wall ms per {unit}": median(runs, "wall") / counts[name] * 1e3,
            "CPU ratio": ratio(runs, timings[first]) * scale,
            "wall ratio": ratio(runs, timings[first], "wall") * scale,
            "CPU ratio of decodes": ratio(runs, timings[first]),
            "range of decodes": spread(runs, timings[first]),
        }
    return rows


def imported(clone: Path, module: str, repository: str) -> Any:
    """A module of other people's code, from a clone of their repository."""
    sys.path.insert(0, str(clone))
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise SystemExit(
            f"{clone} gives no {module} ({problem}): --official takes a clone of {repository}, "
            "which needs the packages that it names"
        ) from None


def show(title: str, rows: Sequence[Row]) -> None:
    """Print rows, which have the same keys, as a table."""
    table = Table(*rows[0], title=title) if rows else Table(title=f"{title}: nothing")
    for row in rows:
        table.add_row(*(text(value) for value in row.values()))
    Console(width=None if Console().is_terminal else 160).print(table)


def text(value: object) -> str:
    """A cell of a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def save(options: argparse.Namespace, tables: Mapping[str, list[Row]], bars: list[Bar]) -> None:
    """Write what has been measured so far, with its provenance."""
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        marks = [{**asdict(bar), "met": bar.met} for bar in bars]
        result = {"provenance": provenance_record(), **tables, "bars": marks}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def finish(options: argparse.Namespace, tables: Mapping[str, list[Row]], bars: list[Bar]) -> None:
    """Print the bars and write everything."""
    sides = {True: "at least", False: "at most"}
    marks: list[Row] = [
        {"what": b.what, "value": b.value, "bar": f"{sides[b.at_least]} {b.limit}", "met": b.met}
        for b in bars
    ]
    show("bars", marks)
    save(options, tables, bars)
