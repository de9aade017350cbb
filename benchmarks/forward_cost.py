"""Cost of a forward pass, beside the `generate` of transformers on the same weights.

Batch 1, greedy, float32, prompt of 64 tokens, 128 new ones and no end-of-sequence, on Qwen2
checkpoints with random weights of two sizes: that of the zoo's tiny-ar, and 512 x 8 layers. Both
sides give the same tokens, which is asserted, and take turns. Reported are CPU and wall
milliseconds of a whole run divided by its 128 forwards.

The share of matrix products and attention is that of the decode, without the prefill: self CPU
time of these operators under torch.profiler, divided (a) by the wall time of that same decode
with everything that Python and the profiler add to it, and (b) by the wall time of the same decode
without the profiler, which ran just before. The truth lies between; the bar is on (b).

    python benchmarks/forward_cost.py --json benchmarks/results/forward_cost.json
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from checkpoints import SMALL, TINY_AR, Config, prompt, write
from harness import Bar, Row, alternate, arguments, finish, median, prepare, ratio, show, spread
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from outpace import LLM

PRODUCTS = re.compile(
    r"mkldnn::_linear_pointwise|aten::(addmm|mm|bmm|linear|matmul|\w*(scaled_dot_product|flash_att)\w*)"
)
PROMPT, TOKENS = 64, 128
PROFILED, PROFILE_ROUNDS = 64, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model and how dear its forward may be, as a part of what it costs with transformers."""

    config: Config
    limit: float
    products: float | None = None


SIZES = {
    "192 x 6 (tiny-ar)": Size(config=TINY_AR, limit=0.5),
    "512 x 8": Size(config=SMALL, limit=0.85, products=0.85),
}


def with_transformers(folder: Path, ids: list[int], tokens: int) -> Callable[[], list[int]]:
    """A run with the reference."""
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    given = torch.tensor([ids])
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    whole = torch.ones_like(given)

    def run() -> list[int]:
        out = model.generate(given, attention_mask=whole, pad_token_id=0, **options)
        new: list[int] = out[0, len(ids) :].tolist()
        return new

    return run


def with_outpace(llm: LLM, ids: list[int], tokens: int) -> Callable[[], list[int]]:
    """The same run here."""
    return lambda: llm.generate(ids, max_tokens=tokens)[0].ids


def decode_seconds(llm: LLM, ids: list[int], tokens: int, profiler: profile | None) -> float:
    """Wall seconds of a decode after its prefill."""
    answer = llm.submit(ids, max_tokens=tokens)
    llm.engine.step()
    if profiler is not None:
        profiler.start()
    began = time.perf_counter()
    while not answer.job.done:
        llm.engine.step()
    seconds = time.perf_counter() - began
    if profiler is not None:
        profiler.stop()
    return seconds


def product_shares(llm: LLM, ids: list[int], tokens: int, rounds: int) -> tuple[float, float]:
    """Shares (a) and (b) of matrix products and attention, medians over the rounds."""
    within, beside = [], []
    for _ in range(rounds + 1):
        plain = decode_seconds(llm, ids, tokens, None)
        profiler = profile(activities=[ProfilerActivity.CPU], acc_events=True)
        profiled = decode_seconds(llm, ids, tokens, profiler)
        events = [event for event in profiler.key_averages() if PRODUCTS.fullmatch(event.key)]
        products = sum(event.self_cpu_time_total for event in events) / 1e6
        within.append(products / profiled)
        beside.append(products / plain)
    return statistics.median(within[1:]), statistics.median(beside[1:])


def compare(name: str, size: Size, tokens: int, rounds: int) -> tuple[Row, list[Bar]]:
    """Measure one size."""
    ids = prompt(PROMPT, size.config["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), size.config)
        llm = LLM(folder, device="cpu", dtype="float32", cache_gib=0.25, prefix_cache=False)
        theirs = with_transformers(Path(folder), ids, tokens)
    ours = with_outpace(llm, ids, tokens)
    assert ours() == theirs(), f"{name}: the outputs differ"
    timings = alternate({"ours": ours, "transformers": theirs}, rounds)
    pair = timings["ours"], timings["transformers"]
    row: Row = {"model": name}
    for side, runs in timings.items():
        row[f"{side}: CPU ms"] = median(runs) / tokens * 1e3
        row["wall ms" if side == "ours" else "wall ms "] = median(runs, "wall") / tokens * 1e3
    row |= {"CPU ratio": ratio(*pair), "wall ratio": ratio(*pair, "wall"), "range": spread(*pair)}
    bars = [Bar(what=f"{name}: CPU ratio", value=row["CPU ratio"], limit=size.limit)]
    shares = product_shares(llm, ids, min(tokens, PROFILED), min(rounds, PROFILE_ROUNDS))
    row["products (a)"], row["products (b)"] = shares
    if size.products is not None:
        value, what = row["products (b)"], f"{name}: share of products and attention"
        bars.append(Bar(what=what, value=value, limit=size.products, at_least=True))
    return row, bars


def main() -> None:
    """Measure all sizes."""
    parser = arguments(__doc__, rounds=15)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="new tokens")
    options = parser.parse_args()
    prepare(options)
    disable_progress_bar()
    rows, bars = [], []
    for name, size in SIZES.items():
        row, marks = compare(name, size, options.tokens, options.rounds)
        rows.append(row)
        bars += marks
    show("cost of a forward, batch 1", rows)
    finish(options, {"forward_cost": rows}, bars)


if __name__ == "__main__":
    main()
