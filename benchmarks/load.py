"""A running server under levels of load: latency and throughput of streamed answers.

    python benchmarks/load.py http://127.0.0.1:8000 --model tiny-ar --streams 1 4 16
    python benchmarks/load.py http://127.0.0.1:8000 --model tiny-ar --rate 2 4 8

A closed loop (`--streams`) sends the next request of a stream after its last answer. An open loop
(`--rate`) sends requests at random times; only it shows overload. Without an address, a server of
the zoo is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice, pairwise
from pathlib import Path

import numpy as np

from client import Client, RequestBody, RequestRecord, send_at_random, send_in_streams
from harness import Row, arguments, finish, prepare, show
from outpace.data.answers import ChatPrompt
from outpace.data.prompt_set import read_prompt_file
from outpace.lab.run import questions_of
from served import served


def request_bodies(options: argparse.Namespace) -> Iterator[RequestBody]:
    """Yield requests without end, each with the next prompt and its own seed."""
    prompts: list[ChatPrompt]
    if options.prompts is None:
        prompts = [str(question.prompt) for question in questions_of("story", 4096)]
    else:
        prompts = read_prompt_file(options.prompts)
    for seed, prompt in enumerate(cycle(prompts)):
        yield {
            "model": options.model,
            "messages": [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else prompt,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options.fields,
        }


async def measure_level(
    client: Client, bodies: Iterable[RequestBody], streams: int | None, rate: float
) -> Row:
    """Send the requests in `streams` streams, or at random times without a number of them."""
    records: list[RequestRecord] = []

    async def send(body: RequestBody) -> None:
        records.append(await client.send_request(body))

    began, cpu = time.perf_counter(), time.process_time()
    if streams is None:
        await send_at_random(bodies, send, rate)
    else:
        await send_in_streams(bodies, send, streams)
    seconds = time.perf_counter() - began
    level: Row = {"rate": rate} if streams is None else {"streams": streams}
    load = (time.process_time() - cpu) / seconds
    return level | summarise(records, seconds) | {"client's share of a core": load}


def summarise(records: Sequence[RequestRecord], seconds: float) -> Row:
    """Return the figures of complete answers, and how many failed by kind."""
    whole = [record for record in records if record.error is None]
    tokens = sum(record.tokens for record in whole)
    times = {
        "TTFT": [each.ttft for each in whole if each.ttft is not None],
        "gap": [b - a for each in whole for a, b in pairwise(each.events)],
        "TPOT": [(e.e2e - e.ttft) / (e.tokens - 1) for e in whole if e.ttft and e.tokens > 1],
        "E2E": [each.e2e for each in whole],
    }
    row: Row = {"requests per second": len(whole) / seconds, "tokens per second": tokens / seconds}
    row["tokens per event"] = tokens / max(sum(len(each.events) for each in whole), 1)
    for name, values in times.items():
        for part in (50, 99):
            row[f"{name} p{part} ms"] = 1e3 * float(np.percentile(values or [np.nan], part))
    failed = Counter(each.error for each in records if each.error is not None)
    return row | {"failed": ", ".join(f"{count} {kind}" for kind, count in failed.items())}


async def measure(url: str, options: argparse.Namespace) -> list[Row]:
    """Measure one level after the other, each after requests that are not counted."""
    bodies, rows = request_bodies(options), []
    async with Client(url, timeout=600.0) as client:
        for level in options.rate or options.streams:
            loop = (None, level) if options.rate else (int(level), 0.0)
            await measure_level(client, islice(bodies, options.warmup), *loop)
            rows.append(await measure_level(client, islice(bodies, options.requests), *loop))
    return rows


def main() -> None:
    """Measure all levels."""
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("url", nargs="?", help="address of a server")
    parser.add_argument("--model", default="tiny-ar", help="name of the model (tiny-ar)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="of each level")
    parser.add_argument("--rate", type=float, nargs="+", help="requests per second of each level")
    parser.add_argument("--requests", type=int, default=64, help="of a level (64)")
    parser.add_argument("--warmup", type=int, default=8, help="requests before a level (8)")
    parser.add_argument("--prompts", type=Path, help="JSON lines, or .txt; else story problems")
    fields = "further fields of each request, such as '{\"max_tokens\": 64}'"
    parser.add_argument("--fields", type=json.loads, default={}, help=fields)
    options = parser.parse_args()
    prepare(options)
    if options.url is not None:
        rows = asyncio.run(measure(options.url.rstrip("/"), options))
    else:
        with served() as server:
            rows = asyncio.run(measure(server.url, options))
    levels = {name: [row[name] for row in rows] for name in rows[0]}
    show("load", [{"": name} | {str(n): v for n, v in enumerate(levels[name])} for name in levels])
    finish(options, {"levels": rows}, [])


if __name__ == "__main__":
    main()
