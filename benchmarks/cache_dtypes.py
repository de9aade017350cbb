"""What the data types of the KV cache cost: bytes of a token, perplexity and speed of GGUF files.

    python benchmarks/cache_dtypes.py FILE … --json benchmarks/results/cache_dtypes.json

Perplexity is that of the first tokens of the pages in docs/, in windows of 2,000. Speed is that of
one row of each of some requests after 512 to 16,384 tokens, as far as the model goes. The data
types take turns; medians of CPU time.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from harness import Bar, Row, alternate, arguments, finish, median, prepare, save, show
from outpace import LLM
from outpace.attention.cached import head_size, write_rows
from outpace.decoding import Forward
from outpace.engine.cache import slot_bytes
from outpace.engine.pack import ScheduledForward

PAGES = Path(__file__).parents[1] / "docs"
DTYPES = "float32", "bfloat16", "float16", "int8"
WINDOW = 2000
DEPTHS = 512, 4096, 16384
REQUESTS = 1, 8
LOSSES = {"float16": 1e-3, "int8": 1e-2}
"""Most that the perplexity may rise, over that of float32."""


def load(path: Path, dtype: str, cache_gib: float = 2.0) -> LLM:
    return LLM(
        *(path, "autoregressive"),
        device="cpu",
        cache_dtype=dtype,
        cache_gib=cache_gib,
        prefix_cache=False,
    )


def perplexity(llm: LLM, count: int) -> float:
    """Return the perplexity of the first tokens of the pages."""
    pages = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    begin, ids = llm.text.encode_plain("", begin=True), llm.text.encode_plain(pages)[:count]
    windows = [begin + ids[first : first + WINDOW] for first in range(0, len(ids), WINDOW)]
    scores = [
        float(score)
        for output in llm.generate(windows, max_tokens=1, prompt_logprobs=0)
        for score in output.prompt_logprobs or ()
        if score is not None
    ]
    return math.exp(-sum(scores) / len(scores))


def make_step(llm: LLM, depth: int, requests: int) -> Callable[[], object]:
    """Return a pass of one row of each request after `depth` random tokens."""
    runner = llm.target
    cache, forward = runner.cache, Forward(ids=[1], start=depth)
    tables = [runner.reserve(depth + 1) for _ in range(requests)]
    forwards = []
    for table in tables:
        assert table is not None
        cache.extend(table, table.size)
        table.written = depth
        forwards.append(ScheduledForward.from_forward(forward, table, runner.config))
        slots = torch.from_numpy(table.slots[: table.size])
        for cached in (*cache.keys, *cache.values):
            shape = len(slots), cached.shape[1], head_size(cached)
            write_rows(cached, slots, torch.randn(shape))
    return partial(runner.run_pass, forwards)


def measure_speed(
    losses: list[Row], path: Path, depth: int, requests: int, rounds: int
) -> Row | None:
    """Return milliseconds of a pass by data type; None beyond the length of the model."""
    steps = {}
    for loss in losses:
        dtype = loss["dtype"]
        llm = load(path, dtype, requests * (depth + 100) * loss["bytes of a token"] / 2**30)
        if depth >= llm.config.max_length:
            return None
        steps[dtype] = make_step(llm, depth, requests)
    times = alternate(steps, rounds)
    found = {f"{dtype} ms": median(timings) * 1e3 for dtype, timings in times.items()}
    return {"file": path.name, "tokens": depth, "requests": requests, **found}


def measure_losses(path: Path, tokens: int) -> tuple[list[Row], list[Bar]]:
    """Return bytes of a token and perplexity by data type, and their bars."""
    rows: list[Row] = []
    for dtype in DTYPES:
        llm = load(path, dtype)
        size = slot_bytes(llm.config, llm.target.cache.keys[0].dtype)
        found = perplexity(llm, tokens)
        rise = found / rows[0]["perplexity"] - 1 if rows else 0.0
        row = {"file": path.name, "dtype": dtype, "bytes of a token": size}
        rows.append(row | {"perplexity": found, "rise": rise})
    bars = [
        Bar(what=f"{path.name}, {row['dtype']}: rise", value=row["rise"], limit=limit)
        for row in rows
        if (limit := LOSSES.get(row["dtype"])) is not None
    ]
    return rows, bars


def main() -> None:
    """Measure all files and write each as it ends."""
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("files", nargs="+", type=Path, help="GGUF files")
    parser.add_argument("--tokens", type=int, default=8000, help="of the perplexity (8000)")
    options: argparse.Namespace = parser.parse_args()
    prepare(options)
    losses: list[Row] = []
    speeds: list[Row] = []
    bars: list[Bar] = []
    for path in options.files:
        rows, own = measure_losses(path, options.tokens)
        losses, bars = losses + rows, bars + own
        for requests in REQUESTS:
            for depth in DEPTHS:
                if (row := measure_speed(rows, path, depth, requests, options.rounds)) is not None:
                    speeds.append(row)
        save(options, {"perplexity": losses, "speed": speeds}, bars)
    show("perplexity", losses)
    show("speed", speeds)
    finish(options, {"perplexity": losses, "speed": speeds}, bars)


if __name__ == "__main__":
    main()
