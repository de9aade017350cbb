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

from outpace.cli.draw import console, replace_file
from outpace.cli.flags import PROMPT_FILE_HELP, MaxTokensFlag, SeedFlag, TemperatureFlag
from outpace.cli.options import MethodFieldFlag
from outpace.cli.terminal import ProgressBars
from outpace.errors import OptionError
from outpace.provenance import provenance_record

if TYPE_CHECKING:
    from outpace.lab.client import Client
    from outpace.lab.load import LoadLevel, Workload
    from outpace.lab.load_figures import LoadFigures

DEFAULT_STREAMS = "1,2,4,8,16,32,64"
MIN_REQUESTS, REQUESTS_PER_STREAM = 64, 4
"""Requests of a level: at least `MIN_REQUESTS`, and `REQUESTS_PER_STREAM` per stream."""

MAX_CLIENT_LOAD = 0.8
"""Share of a CPU core above which the client's own delays affect its figures."""


@dataclass(frozen=True, kw_only=True)
class WorkloadFlags:
    """Flags of the workload."""

    prompts: Annotated[
        Path | None, Option(help=f"{PROMPT_FILE_HELP}; story problems by default.")
    ] = None
    max_tokens: MaxTokensFlag = 128
    temperature: TemperatureFlag = None
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Generate max-tokens for each answer.")
    ] = False
    seed: SeedFlag = 0

    def build_workload(self, model: str, method: Mapping[str, Any] | None, count: int) -> Workload:
        """Build the workload of a model; `method` may only be sent to an outpace server."""
        from outpace.lab.load import Workload, load_prompts

        fields: dict[str, Any] = {"max_tokens": self.max_tokens}
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if method is not None:
            fields["outpace"] = dict(method)
        return Workload(
            model=model,
            prompts=load_prompts(self.prompts, count, self.seed),
            seed=self.seed,
            fields=fields,
        )


WORKLOAD_FLAGS = WorkloadFlags()


def benchmark_serve(
    url: Annotated[str, Argument(help="URL of an OpenAI-compatible server that streams.")],
    model: Annotated[str | None, Option(help="Model; required if the server has several.")] = None,
    method: MethodFieldFlag = None,
    concurrency: Annotated[
        str | None,
        Option(
            help=f"Closed loop: concurrent streams of each level; {DEFAULT_STREAMS} by default."
        ),
    ] = None,
    rate: Annotated[
        str | None, Option(help="Open loop: requests per second of each level, such as 2,4,8.")
    ] = None,
    requests: Annotated[
        int | None, Option(help=f"Requests per level; {REQUESTS_PER_STREAM} per stream by default.")
    ] = None,
    warmup: Annotated[int, Option(help="Warm-up requests before each level, not measured.")] = 8,
    workload_flags: WorkloadFlags = WORKLOAD_FLAGS,
    api_key: Annotated[str | None, Option(help="API key of the server.")] = None,
    timeout: Annotated[float, Option(help="Timeout of a request in seconds.")] = 600.0,
    goodput: Annotated[
        str | None, Option(help="Latency limits in ms, such as ttft=200,gap=50; also tpot, e2e.")
    ] = None,
    output: Annotated[Path | None, Option(help="Write the figures to this file, as JSON.")] = None,
) -> None:
    """Measure latency and throughput of a running server at several levels of load."""
    from outpace.lab.client import Client
    from outpace.lab.load import count_requests
    from outpace.lab.load_figures import parse_limits

    limits = {} if goodput is None else parse_limits(goodput)
    levels = build_levels(concurrency, rate, requests, workload_flags.seed)
    if warmup < 0:
        raise OptionError("warmup", warmup, "must be at least 0")
    client = Client(url, api_key, timeout=timeout)
    with replace_file(output) as file:
        name = model or asyncio.run(find_only_model(client))
        workload = workload_flags.build_workload(name, method, count_requests(levels, warmup))
        interrupted = run_levels(client, workload, levels, warmup)
        measured = [level.summarise(limits) for level in levels if level.records]
        if interrupted and not measured:
            raise KeyboardInterrupt
        console.print(level_table(measured))
        if file is not None:
            settings = describe_run(client, workload, warmup) | {"interrupted": interrupted}
            result = {"provenance": provenance_record(api_key), **settings, "levels": measured}
            file.write_text(json.dumps(result, indent=2) + "\n")
    if interrupted:
        raise KeyboardInterrupt
    check_answered(levels)


def build_levels(
    concurrency: str | None, rate: str | None, requests: int | None, seed: int
) -> list[LoadLevel]:
    from outpace.lab.load import ClosedLoop, LoadLevel, Poisson

    if concurrency is not None and rate is not None:
        raise ValueError("--concurrency and --rate cannot be combined")
    if requests is not None and requests < 1:
        raise OptionError("requests", requests, "must be at least 1")
    if rate is not None:
        rates = parse_numbers(rate, float, "rate")
        return [
            LoadLevel(arrivals=Poisson(rate=each, seed=seed), requests=requests or MIN_REQUESTS)
            for each in rates
        ]
    streams = parse_numbers(
        DEFAULT_STREAMS if concurrency is None else concurrency, int, "concurrency"
    )
    return [
        LoadLevel(
            arrivals=ClosedLoop(concurrency=each),
            requests=requests or max(MIN_REQUESTS, REQUESTS_PER_STREAM * each),
        )
        for each in streams
    ]


Number = TypeVar("Number", int, float)


def parse_numbers(text: str, kind: type[Number], name: str) -> list[Number]:
    """Parse a list of numbers such as `1,2,4`."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(name, text, "must be a list of numbers such as 1,2,4") from None


async def find_only_model(client: Client) -> str:
    async with client:
        names = await client.list_models()
    if len(names) != 1:
        raise ValueError(f"--model is required: the server has {', '.join(names) or 'no models'}")
    return names[0]


def run_levels(
    client: Client, workload: Workload, levels: Sequence[LoadLevel], warmup: int
) -> bool:
    """Measure with a progress bar; returns whether Ctrl-C interrupted it."""
    from outpace.lab.load import measure_levels

    with ProgressBars() as shown:
        bar = shown.add_task("warm-up", total=sum(level.requests for level in levels))

        def update_bar(level: LoadLevel) -> None:
            speed = level.tokens / level.seconds
            text = f"{level.arrivals.name} {level.arrivals.value:g}: {speed:.0f} tokens per second"
            failed = f", {level.failed} failed" if level.failed else ""
            shown.update(bar, advance=1, description=text + failed)

        async def run_client() -> None:
            async with client:
                await measure_levels(client, workload, levels, warmup=warmup, progress=update_bar)

        try:
            asyncio.run(run_client())
        except KeyboardInterrupt:
            return True
    return False


def describe_run(client: Client, workload: Workload, warmup: int) -> dict[str, Any]:
    """Describe for the JSON file what was sent and what was counted."""
    return {
        "url": client.url,
        "model": workload.model,
        "fields": dict(workload.fields),
        "seed": workload.seed,
        "prompts": len(workload.prompts),
        "counted": "output tokens of whole answers, from usage; no prompts, no warm-up",
        "not_counted": {"first_requests": 1, "warmup_requests_of_each_level": warmup},
    }


TIME_KEYS = {"TTFT": "ttft_ms", "gap": "gap_ms", "TPOT": "tpot_ms", "E2E": "e2e_ms"}
RATE_KEYS = ("requests_per_second", "tokens_per_second")
MEAN_KEYS = ("tokens_per_event", "tokens_per_forward")


def level_table(levels: Sequence[LoadFigures]) -> Table:
    name = "rate" if "rate" in levels[0] else "concurrency"
    table = Table(name, box=None, pad_edge=False, header_style="bold")
    for level in levels:
        table.add_column(f"{level[name]:g}", justify="right", no_wrap=True)

    def add_row(title: str, values: Iterable[float | None]) -> None:
        table.add_row(title, *("" if value is None else format_number(value) for value in values))

    for key in RATE_KEYS:
        add_row(key.replace("_", " "), (level[key] for level in levels))
    for title, key in TIME_KEYS.items():
        for part in ("p50", "p99"):
            add_row(f"{title} {part}, ms", (level[key] and level[key][part] for level in levels))
    for key in MEAN_KEYS:
        add_row(key.replace("_", " "), (level[key] and level[key]["mean"] for level in levels))
    if "goodput" in levels[0]:
        add_row("goodput, %", (100 * level["goodput"]["share"] for level in levels))
    for kind in sorted({kind for level in levels for kind in level["errors"]}):
        add_row(f"failed: {kind}", (level["errors"].get(kind) for level in levels))
    return table


def format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def check_answered(levels: Sequence[LoadLevel]) -> None:
    failed = Counter(e.error for level in levels for e in level.records if e.error is not None)
    if failed.total() == sum(len(level.records) for level in levels):
        kinds = ", ".join(f"{count} {kind}" for kind, count in failed.items())
        raise ValueError(f"all requests failed: {kinds}")
    busy = [level for level in levels if level.cpu > MAX_CLIENT_LOAD * level.seconds]
    if busy:
        where = ", ".join(f"{level.arrivals.value:g}" for level in busy)
        console.print(
            f"at {busy[0].arrivals.name} {where} the benchmark client itself was overloaded",
            style="bold",
        )
