"""Milliseconds of a step on this computer, beside llama.cpp and transformers, in one run.

    python benchmarks/cpu.py --json benchmarks/results/cpu.json --png docs/cpu.png

Random weights of a published shape, bfloat16 in the file. A step feeds 1 to 32 rows behind a prompt
of 64 tokens and reads the most probable token of each. Every side has its turn in every round;
medians of wall time. Sides: outpace in float32, bfloat16 and int8, transformers in float32 and
bfloat16, and llama.cpp in four formats, where the extra `llama` is installed. Peak memory of a
process that loads a model and says one token, over the size of the bfloat16 file, comes first.

From the steps follows a projection, which is no measurement: what a token would cost with each
method, if it kept as many tokens per forward as on the zoo (`benchmarks/results/methods.json`) with
as many rows. What drafts and verifiers cost beside the target is left out. `--draw` makes the
picture again from a JSON file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

import llama
from checkpoints import TINY_AR, Config, prompt, qwen2
from harness import (
    Bar,
    Row,
    Timing,
    alternate,
    arguments,
    finish,
    median,
    prepare,
    save,
    show,
    timed,
)
from outpace import LLM
from outpace.checkpoints.checkpoint import translate_config
from outpace.checkpoints.compress import compress_checkpoint
from outpace.checkpoints.load import save_model
from outpace.decoding import Forward
from outpace.engine.pack import ScheduledForward
from outpace.models.transformer import Transformer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SHAPES: dict[str, Config] = {
    "Qwen2.5-0.5B": qwen2(896, 24, 14, 2, 4864, 151936),
    "Qwen2.5-1.5B": qwen2(1536, 28, 12, 2, 8960, 151936),
    "tiny": TINY_AR,
}
PROMPT = 64
ROWS = [1, 4, 16, 32]
OURS: dict[str, dict[str, Any]] = {
    "outpace float32": {"dtype": "float32"},
    "outpace bfloat16": {"dtype": "bfloat16"},
    "outpace int8": {"quantize": "int8"},
}
THEIRS = {f"transformers {name}": name for name in ("float32", "bfloat16")}
WRITTEN = "outpace int8, from a file of 8 bits"
LLAMA = {f"llama.cpp {kind}": kind for kind in llama.FORMATS}
RESULTS = Path(__file__).parent / "results" / "methods.json"
BLOCK, KEPT = 16, 6
"""Rows and tokens of a step of DFlash or verified WeDLM, for the bars."""

PAUSE = 0.01
"""Seconds between two sides: each has threads of its own, which look out for more for a while."""

Step = Callable[[Sequence[int]], object]


def made(config: Config, folder: Path) -> Path:
    """A checkpoint of random weights in bfloat16."""
    torch.manual_seed(0)
    save_model(Transformer(translate_config(config)).requires_grad_(False), folder)
    return folder


def make_feed(path: Path, slots: int, **loading: Any) -> Callable[..., list[int]]:
    """Return a function that runs rows of one request from a slot on and predicts some slots."""
    llm = LLM(path, device="cpu", prefix_cache=False, **loading)
    runner = llm.target
    table = runner.reserve(slots)
    assert table is not None
    runner.cache.extend(table, slots)

    def feed(ids: Sequence[int], start: int, predict: Sequence[int] | None = None) -> list[int]:
        forward = Forward(ids=ids, start=start, predict=predict)
        scheduled = ScheduledForward.from_forward(forward, table, runner.config)
        return runner.run_pass([scheduled])[0].tokens

    return feed


def with_outpace(folder: Path, given: Sequence[int], loading: dict[str, Any]) -> Step:
    """A step of a request."""
    feed = make_feed(folder, PROMPT + max(ROWS), cache_gib=0.1, **loading)
    feed(given, 0)
    return lambda rows: feed(rows, PROMPT, range(PROMPT + 1, PROMPT + 1 + len(rows)))


def with_transformers(folder: Path, given: Sequence[int], dtype: str) -> Step:
    """A step of the reference."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    cache = DynamicCache(config=model.config)

    @torch.inference_mode()
    def feed(ids: Sequence[int]) -> list[int]:
        # By place: releases of transformers differ in the name of the cache.
        logits = model(torch.tensor([list(ids)]), None, None, cache, use_cache=True).logits
        tokens: list[int] = logits[0].argmax(-1).tolist()
        return tokens

    def step(rows: Sequence[int]) -> list[int]:
        tokens = feed(rows)
        cache.crop(-len(rows))
        return tokens

    feed(given)
    return step


def sides(folder: Path, given: Sequence[int], wanted: Sequence[str]) -> Iterator[tuple[str, Step]]:
    """Every side that is wanted and can be had."""
    for name, loading in OURS.items():
        if name.split()[0] in wanted:
            yield name, with_outpace(folder, given, loading)
    for name, dtype in THEIRS.items():
        if name.split()[0] in wanted:
            yield name, with_transformers(folder, given, dtype)
    if "llama.cpp" not in wanted:
        return
    if missing := llama.available():
        print(f"llama.cpp is left out: {missing} (pip install '.[llama]')")
        return
    for name, kind in LLAMA.items():
        path = llama.write(folder, kind, folder / f"{kind}.gguf")
        yield name, llama.stepper(path, given, max(ROWS))


def settled(run: Callable[[], object]) -> Timing:
    """Seconds of a call, once the threads of the side before it have stopped waiting for work."""
    time.sleep(PAUSE)
    return timed(run)


def measured(shape: str, steps: dict[str, Step], threads: int, rounds: int) -> list[Row]:
    """Milliseconds of every side by rows."""
    torch.set_num_threads(threads)
    rows: dict[str, Row] = {
        name: {"shape": shape, "threads": threads, "side": name} for name in steps
    }
    for count in ROWS:
        ids = prompt(count, SHAPES[shape]["vocab_size"], seed=count)
        turns = {name: partial(step, ids) for name, step in steps.items()}
        for name, timings in alternate(turns, rounds, settled).items():
            rows[name][f"{count} rows"] = median(timings, "wall") * 1e3
    return list(rows.values())


LOADED = """
import json, re, sys
from pathlib import Path
from outpace import LLM

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

before = peak()
llm = LLM(sys.argv[1], "lookup", device="cpu", cache_gib=0.01, **json.loads(sys.argv[2]))
llm.generate([[1, 2, 3]], max_tokens=1)
print(before, peak())
"""
"""On Linux; what `getrusage` calls the peak of a process is at least its parent's."""


def memory(folder: Path) -> list[Row]:
    """Peak memory of loading and one token, over the file, each in a process of its own."""
    size = (folder / "model.safetensors").stat().st_size
    written = compress_checkpoint(folder, folder / "int8")
    loads: dict[str, tuple[Path, dict[str, Any]]] = {
        **{name: (folder, loading) for name, loading in OURS.items()},
        WRITTEN: (written, {}),
    }
    rows = []
    for name, (path, loading) in loads.items():
        words = [sys.executable, "-c", LOADED, str(path), json.dumps(loading)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        before, peak = map(int, done.stdout.split())
        rows.append(
            {
                "side": name,
                "peak GB": peak / 1e9,
                "of them before loading": before / 1e9,
                "over the file": peak / size,
                "loading over the file": (peak - before) / size,
            }
        )
    return rows


def cost(row: Row, count: float) -> float:
    """Milliseconds of a step of so many rows, between those that were measured."""
    return float(np.interp(count, ROWS, [row[f"{rows} rows"] for rows in ROWS]))


def projected(rows: Sequence[Row]) -> list[Row]:
    """What a token would cost with each method, at its rows and tokens per forward on the zoo."""
    zoo = json.loads(RESULTS.read_text())["results"]
    methods = {f"{r['kind']} {r['setting']}".strip(): r for r in zoo if r["p_cache"]}
    kept = {name: (r["tokens_per_forward"], r["p_cache"]) for name, r in methods.items()}
    kept[f"{BLOCK} rows, {KEPT} tokens"] = KEPT, KEPT / BLOCK
    found = []
    for row in (row for row in rows if row["side"] in OURS):
        for name, (tokens, share) in kept.items():
            if tokens / share > ROWS[-1]:
                continue  # of more rows than were measured
            each = cost(row, tokens / share) / tokens
            where = {"shape": row["shape"], "threads": row["threads"], "side": row["side"]}
            found.append(
                where
                | {"method": name, "rows": tokens / share, "tokens per forward": tokens}
                | {"projected ms per token": each, "projected tokens per second": 1e3 / each}
            )
    return found


LIMITS = [
    ("outpace float32", 1, "llama.cpp f32", 1, 1.25),
    ("outpace bfloat16", 1, "llama.cpp bf16", 1, 1.6),
    ("outpace bfloat16", 16, "llama.cpp bf16", 16, 0.7),
    ("outpace int8", 1, "llama.cpp q8_0", 1, 1.4),
    ("outpace int8", 16, "llama.cpp q8_0", 16, 0.35),
    ("outpace int8", 16, "llama.cpp q4_0", 16, 0.7),
    ("outpace int8", 16, "outpace int8", 1, 2.2),
]
"""A step of a side with so many rows, at most so often a step of another."""


def bars(rows: Sequence[Row], loads: Sequence[Row], shape: str) -> list[Bar]:
    """Of one shape with the most threads, as far as its sides are there."""
    most = max(row["threads"] for row in rows)
    by_side = {r["side"]: r for r in rows if r["threads"] == most and r["shape"] == shape}
    found = []
    for ours, count, theirs, other, limit in LIMITS:
        if ours in by_side and theirs in by_side:
            value = by_side[ours][f"{count} rows"] / by_side[theirs][f"{other} rows"]
            what = f"{ours}, {count} rows, over {theirs}, {other} rows"
            found.append(Bar(what=what, value=value, limit=limit))
    if "outpace int8" in by_side and (singles := LLAMA.keys() & by_side.keys()):
        best = min(by_side[name]["1 rows"] for name in singles)
        value = cost(by_side["outpace int8"], BLOCK) / KEPT
        what = f"projected: {BLOCK} rows of int8 for {KEPT} tokens, ms per token"
        found.append(Bar(what=what, value=value, limit=best))
    for row in loads:
        if row["side"] in ("outpace int8", WRITTEN):
            what = f"{row['side']}: peak memory, over the bfloat16 file"
            found.append(Bar(what=what, value=row["over the file"], limit=1.3))
    return found


def draw(rows: Sequence[Row], shape: str, path: Path) -> None:
    """Milliseconds by rows, a pane for each number of threads."""
    rows = [row for row in rows if row["shape"] == shape]
    threads = sorted({row["threads"] for row in rows})
    figure, panes = plt.subplots(
        1, len(threads), figsize=(5.2 * len(threads), 4.4), sharey=True, layout="constrained"
    )
    styles = {"outpace": "-o", "llama.cpp": "--s", "transformers": ":^"}
    for pane, count in zip(np.atleast_1d(panes), threads, strict=True):
        for row in (row for row in rows if row["threads"] == count):
            style = styles[row["side"].split()[0]]
            pane.plot(ROWS, [row[f"{n} rows"] for n in ROWS], style, ms=4, label=row["side"])
        pane.set_xscale("log", base=2)
        pane.set_yscale("log")
        pane.set_xticks(ROWS, [str(n) for n in ROWS])
        pane.set_xlabel("rows of a step")
        pane.set_title(f"{count} thread{'s' * (count > 1)}", size=10)
        pane.grid(alpha=0.3)
    np.atleast_1d(panes)[0].set_ylabel("milliseconds per step")
    np.atleast_1d(panes)[-1].legend(fontsize=7)
    figure.suptitle(f"Random weights of {shape}'s shape")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All shapes."""
    tables: dict[str, list[Row]] = {"steps": [], "memory": [], "projection": [], "llama.cpp": []}
    if "llama.cpp" in options.sides and llama.available() is None:
        tables["llama.cpp"] = [llama.built()]
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as name:
            folder = made(SHAPES[shape], Path(name))
            given = prompt(PROMPT, SHAPES[shape]["vocab_size"])
            tables["memory"] += [{"shape": shape, **row} for row in memory(folder)]
            torch.set_num_threads(max(options.counts))
            steps = dict(sides(folder, given, options.sides))
            for threads in options.counts:
                tables["steps"] += measured(shape, steps, threads, options.rounds)
                save(options, tables, [])
            del steps
    tables["projection"] = projected(tables["steps"])
    return tables


def main() -> None:
    """Measure, show, write and draw; or only draw."""
    parser = arguments(__doc__, rounds=7)
    sides_of = ["outpace", "transformers", "llama.cpp"]
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=["Qwen2.5-0.5B"], help="of models"
    )
    parser.add_argument(
        "--sides", nargs="+", choices=sides_of, default=sides_of, help="programs (all)"
    )
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 2], help="threads (1 2)")
    parser.add_argument("--png", type=Path, help="picture")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only draw what this file holds")
    options = parser.parse_args()
    if options.draw is not None:
        rows = json.loads(options.draw.read_text())["steps"]
        draw(rows, rows[0]["shape"], options.png)
        return
    prepare(options)
    tables = measure(options)
    shape = options.shapes[0]
    loads = [row for row in tables["memory"] if row["shape"] == shape]
    for title, rows in tables.items():
        show(title, rows)
    finish(options, tables, bars(tables["steps"], loads, shape))
    if options.png is not None:
        draw(tables["steps"], shape, options.png)


if __name__ == "__main__":
    main()
