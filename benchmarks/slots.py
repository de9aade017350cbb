"""Milliseconds of a step of many requests on this computer, beside llama.cpp's parallel slots.

    python benchmarks/slots.py --json benchmarks/results/slots.json

Random weights of a published shape, as `benchmarks/cpu.py` makes them. A step feeds one row of each
of 1 to 64 requests, behind a prompt of 64 tokens of its own, and reads the most probable token of
each: what autoregressive decoding does with so many at a time. Every side has its turn in every
round; medians of wall time.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cpu
import llama
from checkpoints import prompt
from cpu import OURS, SHAPES, THEIRS
from harness import Bar, Row, alternate, arguments, finish, median, prepare, save, show
from outpace import LLM
from outpace.decoding import Forward
from outpace.engine.pack import ScheduledForward

REQUESTS = [1, 4, 16, 64]
PROMPT = 64
LIMIT = 0.8
"""Of a step beside transformers in the same dtype, with the most requests."""

Step = Callable[[Sequence[int]], object]
Prompts = Sequence[Sequence[int]]


def with_outpace(folder: Path, prompts: Prompts, loading: dict[str, Any]) -> Step:
    """A step of requests."""
    llm = LLM(folder, device="cpu", cache_gib=0.5, prefix_cache=False, **loading)
    runner = llm.target
    tables = [runner.reserve(PROMPT + 1) for _ in prompts]

    def feed(given: Prompts, start: int) -> list[int]:
        feeds = []
        for ids, table in zip(given, tables, strict=True):
            assert table is not None
            runner.cache.extend(table, table.size)
            feeds.append(
                ScheduledForward.from_forward(Forward(ids=ids, start=start), table, runner.config)
            )
        return [prediction.tokens[0] for prediction in runner.run_pass(feeds)]

    feed(prompts, 0)
    return lambda rows: feed([[row] for row in rows], PROMPT)


def with_transformers(folder: Path, prompts: Prompts, dtype: str) -> Step:
    """A step of the reference, whose batch has rows of one length."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    cache = DynamicCache(config=model.config)

    @torch.inference_mode()
    def feed(given: Prompts) -> list[int]:
        ids = torch.tensor([list(each) for each in given])
        logits = model(ids, None, None, cache, use_cache=True, logits_to_keep=1).logits
        tokens: list[int] = logits[:, -1].argmax(-1).tolist()
        return tokens

    def step(rows: Sequence[int]) -> list[int]:
        tokens = feed([[row] for row in rows])
        cache.crop(-1)
        return tokens

    feed(prompts)
    return step


def sides(folder: Path, prompts: Prompts, wanted: Sequence[str]) -> dict[str, Step]:
    """Every side that is wanted and can be had."""
    found: dict[str, Step] = {}
    if "outpace" in wanted:
        found |= {name: with_outpace(folder, prompts, loading) for name, loading in OURS.items()}
    if "transformers" in wanted:
        found |= {name: with_transformers(folder, prompts, kind) for name, kind in THEIRS.items()}
    if "llama.cpp" not in wanted:
        return found
    if missing := llama.available():
        print(f"llama.cpp is left out: {missing} (pip install '.[llama]')")
        return found
    for name, kind in cpu.LLAMA.items():
        path = folder / f"{kind}.gguf"
        if not path.exists():
            llama.write(folder, kind, path)
        found[name] = llama.together(path, prompts, PROMPT)
    return found


def measure(options: argparse.Namespace) -> tuple[list[Row], list[Bar]]:
    """Milliseconds of every side by the number of requests."""
    vocab = SHAPES[options.shape]["vocab_size"]
    rows: dict[str, Row] = {}
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as name:
        folder = cpu.made(SHAPES[options.shape], Path(name))
        for count in options.requests:
            prompts = [prompt(PROMPT, vocab, seed) for seed in range(count)]
            last = prompt(count, vocab, seed=count)
            steps = sides(folder, prompts, options.sides)
            turns = {name: partial(step, last) for name, step in steps.items()}
            for side, timings in alternate(turns, options.rounds, cpu.settled).items():
                row = rows.setdefault(side, {"shape": options.shape, "side": side})
                row["threads"] = torch.get_num_threads()
                row[f"{count} requests"] = median(timings, "wall") * 1e3
            del steps, turns
            save(options, {"slots": list(rows.values())}, [])
    most = f"{max(options.requests)} requests"
    for dtype in ("float32", "bfloat16"):
        ours, theirs = (rows.get(f"{side} {dtype}") for side in ("outpace", "transformers"))
        if ours and theirs:
            what = f"{most} in {dtype}, over transformers"
            bars.append(Bar(what=what, value=ours[most] / theirs[most], limit=LIMIT))
    return list(rows.values()), bars


def main() -> None:
    """Measure, show and write."""
    parser = arguments(__doc__, rounds=7, threads=2)
    every = ["outpace", "transformers", "llama.cpp"]
    parser.add_argument("--shape", choices=SHAPES, default="Qwen2.5-0.5B", help="of the model")
    parser.add_argument("--sides", nargs="+", choices=every, default=every, help="programs (all)")
    parser.add_argument("--requests", nargs="+", type=int, default=REQUESTS, help="at a time")
    options = parser.parse_args()
    prepare(options)
    rows, bars = measure(options)
    show("a row of each request", rows)
    finish(options, {"slots": rows}, bars)


if __name__ == "__main__":
    main()
