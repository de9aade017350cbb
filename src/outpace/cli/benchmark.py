"""The command `benchmark serve`, which measures a running server."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from rich.table import Table
from typer import Argument, Option

from outpace.cli.draw import console
from outpace.cli.flags import MaxTokens, Seed, Temperature
from outpace.cli.output import replaced
from outpace.cli.terminal import bars
from outpace.errors import OptionError
from outpace.provenance import provenance

if TYPE_CHECKING:
    from outpace.benchmark.client import Client
    from outpace.benchmark.load_figures import Figures
    from outpace.benchmark.measure import Level
    from outpace.benchmark.workload import Workload

STREAMS = "1,2,4,8,16,32,64"
LEAST, TURNS = 64, 4
"""Requests of a level: at least `MIN_REQUESTS`, and `REQUESTS_PER_STREAM` per stream."""

BUSY = 0.8
"""Share of a CPU core above which the client's own delays affect its figures."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Flags of the workload."""

    endpoint: Annotated[str, Option(help="Endpoint: chat or completions.")] = "chat"
    prompts: Annotated[
        Path | None, Option(help="JSON lines with prompt or messages; story problems by default.")
    ] = None
    max_tokens: MaxTokens = 128
    temperature: Temperature = None
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Generate max-tokens for each answer.")
    ] = False
    seed: Seed = 0

    def workload(self, model: str, method: Mapping[str, Any] | None, count: int) -> Workload:
        """Build the workload of a model; `method` may only be sent to an outpace server."""
        from outpace.benchmark.workload import Workload, prompts_of

        fields: dict[str, Any] = {"max_tokens": self.max_tokens}
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if method is not None:
            fields["outpace"] = dict(method)
        return Workload(
            model=model,
            prompts=prompts_of(self.prompts, count, self.seed),
            endpoint=self.endpoint,  # type: ignore[arg-type]
            seed=self.seed,
            fields=fields,
        )


ASKED = Asked()


def benchmark_serve(
    url: Annotated[str, Argument(help="URL of an OpenAI-compatible server that streams.")],
    model: Annotated[str | None, Option(help="Model; required if the server has several.")] = None,
    method: Mapping[str, Any] | None = None,
    concurrency: Annotated[
        str | None,
        Option(help=f"Closed loop: concurrent streams of each level; {STREAMS} by default."),
    ] = None,
    rate: Annotated[
        str | None, Option(help="Open loop: requests per second of each level, such as 2,4,8.")
    ] = None,
    requests: Annotated[
        int | None,
        Option(help=f"Requests per level; by default {TURNS} per stream, at least {LEAST}."),
    ] = None,
    warmup: Annotated[int, Option(help="Warm-up requests before each level, not measured.")] = 8,
    workload_flags: Asked = ASKED,
    api_key: Annotated[str | None, Option(help="API key of the server.")] = None,
    timeout: Annotated[float, Option(help="Timeout of a request in seconds.")] = 600.0,
    goodput: Annotated[
        str | None, Option(help="Latency limits in ms, such as ttft=200,gap=50; also tpot, e2e.")
    ] = None,
    output: Annotated[Path | None, Option(help="Write the figures to this file, as JSON.")] = None,
    png: Annotated[
        Path | None, Option(help="Write a plot of throughput and latency to this file.")
    ] = None,
) -> None:
    """Measure latency and throughput of a running server at several levels of load."""
    from outpace.benchmark.client import Client
    from outpace.benchmark.load_figures import parse_limits
    from outpace.benchmark.measure import requests_of

    limits = {} if goodput is None else parse_limits(goodput)
    levels = levels_of(concurrency, rate, requests, workload_flags.seed)
    if warmup < 0:
        raise OptionError("warmup", warmup, f"warmup must be at least 0, got {warmup}")
    client = Client(url, api_key, timeout=timeout)
    with replaced(output) as file, replaced(png) as picture:
        if picture is not None:
            from outpace.benchmark.plots import draw_levels
        name = model or asyncio.run(only_model(client))
        workload = workload_flags.workload(name, method, requests_of(levels, warmup))
        interrupted = run(client, workload, levels, warmup)
        measured = [level.summary(limits) for level in levels if level.exchanges]
        if interrupted and not measured:
            raise KeyboardInterrupt
        console.print(level_table(measured))
        if file is not None:
            settings = described(client, workload, warmup) | {"interrupted": interrupted}
            result = {"provenance": provenance(api_key), **settings, "levels": measured}
            file.write_text(json.dumps(result, indent=2) + "\n")
        if picture is not None:
            draw_levels(measured, f"{name} at {client.url}", picture)
    if interrupted:
        raise KeyboardInterrupt
    check(levels)


def levels_of(
    concurrency: str | None, rate: str | None, requests: int | None, seed: int
) -> list[Level]:
    """Build one level per number; raises `ValueError` for invalid numbers."""
    from outpace.benchmark.arrivals import Closed, Poisson
    from outpace.benchmark.measure import Level

    if concurrency is not None and rate is not None:
        raise ValueError("--concurrency and --rate cannot be combined")
    if requests is not None and requests < 1:
        raise OptionError("requests", requests, f"requests must be at least 1, got {requests}")
    if rate is not None:
        rates = numbers(rate, float, "rate")
        return [
            Level(arrivals=Poisson(rate=each, seed=seed), requests=requests or LEAST)
            for each in rates
        ]
    streams = numbers(STREAMS if concurrency is None else concurrency, int, "concurrency")
    return [
        Level(arrivals=Closed(concurrency=each), requests=requests or max(LEAST, TURNS * each))
        for each in streams
    ]


Number = TypeVar("Number", int, float)


def numbers(text: str, kind: type[Number], name: str) -> list[Number]:
    """Parse a list of numbers such as `1,2,4`."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        message = f"{name} must be a list of numbers such as 1,2,4, got {text!r}"
        raise OptionError(name, text, message) from None


async def only_model(client: Client) -> str:
    """Return the model of a server; raises `ValueError` unless it has exactly one."""
    async with client:
        names = await client.models()
    if len(names) != 1:
        raise ValueError(f"--model is required: the server has {', '.join(names) or 'no models'}")
    return names[0]


def run(client: Client, workload: Workload, levels: Sequence[Level], warmup: int) -> bool:
    """Measure with a progress bar; returns whether Ctrl-C interrupted it."""
    from outpace.benchmark.measure import measure

    with bars() as shown:
        bar = shown.add_task("warm-up", total=sum(level.requests for level in levels))

        def progress(level: Level) -> None:
            speed = level.tokens / level.seconds
            text = f"{level.arrivals.name} {level.arrivals.value:g}: {speed:.0f} tokens per second"
            failed = f", {level.failed} failed" if level.failed else ""
            shown.update(bar, advance=1, description=text + failed)

        async def whole() -> None:
            async with client:
                await measure(client, workload, levels, warmup=warmup, progress=progress)

        try:
            asyncio.run(whole())
        except KeyboardInterrupt:
            return True
    return False


def described(client: Client, workload: Workload, warmup: int) -> dict[str, Any]:
    """Describe for the JSON file what was sent and what was counted."""
    return {
        "url": client.url,
        "model": workload.model,
        "endpoint": workload.endpoint,
        "fields": dict(workload.fields),
        "seed": workload.seed,
        "prompts": len(workload.prompts),
        "counted": "output tokens of whole answers, from usage; no prompts, no warm-up",
        "not_counted": {"first_requests": 1, "warmup_requests_of_each_level": warmup},
    }


TIMES = {"TTFT": "ttft_ms", "gap": "gap_ms", "TPOT": "tpot_ms", "E2E": "e2e_ms"}
RATES = ("requests_per_second", "tokens_per_second")
MEANS = ("tokens_per_event", "tokens_per_forward")


def level_table(levels: Sequence[Figures]) -> Table:
    """Build a table with a column per level and a row per figure; times in milliseconds."""
    name = "rate" if "rate" in levels[0] else "concurrency"
    table = Table(name, box=None, pad_edge=False, header_style="bold")
    for level in levels:
        table.add_column(f"{level[name]:g}", justify="right", no_wrap=True)

    def row(title: str, values: Iterable[float | None]) -> None:
        table.add_row(title, *("" if value is None else digits(value) for value in values))

    for key in RATES:
        row(key.replace("_", " "), (level[key] for level in levels))
    for title, key in TIMES.items():
        for part in ("p50", "p99"):
            row(f"{title} {part}, ms", (level[key] and level[key][part] for level in levels))
    for key in MEANS:
        row(key.replace("_", " "), (level[key] and level[key]["mean"] for level in levels))
    if "goodput" in levels[0]:
        row("goodput, %", (100 * level["goodput"]["share"] for level in levels))
    for kind in sorted({kind for level in levels for kind in level["errors"]}):
        row(f"failed: {kind}", (level["errors"].get(kind) for level in levels))
    return table


def digits(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def check(levels: Sequence[Level]) -> None:
    """Raise `ValueError` if all requests failed; warn if the client was too slow."""
    failed = Counter(e.error for level in levels for e in level.exchanges if e.error is not None)
    if failed.total() == sum(len(level.exchanges) for level in levels):
        kinds = ", ".join(f"{count} {kind}" for kind, count in failed.items())
        raise ValueError(f"all requests failed: {kinds}")
    busy = [level for level in levels if level.cpu > BUSY * level.seconds]
    if busy:
        where = ", ".join(f"{level.arrivals.value:g}" for level in busy)
        console.print(
            f"at {busy[0].arrivals.name} {where} the benchmark client itself was overloaded",
            style="bold",
        )
