"""Cost of a forward pass, beside the `generate` of transformers on the same weights.

Greedy, float32, prompts of 64 tokens, 128 new ones and no end-of-sequence, on Qwen2 checkpoints
with random weights of two sizes: that of the zoo's tiny-ar, and 512 x 8 layers. Both sides give the
same tokens, which is asserted, and take turns. Reported are CPU and wall milliseconds of a whole
run divided by its forwards; for one prompt, and for several that decode together (with half the new
tokens and a third of the rounds).

The share of matrix products and attention is that of the decode, without the prefill: self CPU
time of these operators and compiled loops under torch.profiler, divided (a) by the wall time of
that same decode with everything that Python and the profiler add to it, and (b) by the wall time of
the same decode without the profiler, which ran just before. The truth lies between; the bar is on
(b).

    python benchmarks/forward_cost.py --json benchmarks/results/forward_cost.json
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from checkpoints import SMALL, TINY_AR, Config, load, prompt, write
from harness import Bar, Row, alternate, arguments, finish, median, prepare, ratio, show, spread
from outpace import LLM
from outpace.kernels.loader import load_library

PRODUCTS = re.compile(
    r"mkldnn::_linear_pointwise|aten::(addmm|mm|bmm|linear|matmul|\w*(scaled_dot_product|flash_att)\w*)"
    r"|outpace_(multiply|attend)"
)
PROMPT, TOKENS = 64, 128
BATCHES = [4, 16, 64]
PROFILED, PROFILE_ROUNDS = 64, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model and how dear a run may be by its prompts, as a part of that with transformers."""

    config: Config
    limits: Mapping[int, float]
    products: float | None = None


SIZES = {
    "192 x 6 (tiny-ar)": Size(config=TINY_AR, limits={1: 0.55, 16: 0.7, 64: 0.9}),
    "512 x 8": Size(config=SMALL, limits={1: 0.75, 4: 0.75, 16: 0.75, 64: 0.75}, products=0.85),
}
Prompts = list[list[int]]


def with_transformers(folder: Path, prompts: Prompts, tokens: int) -> Callable[[], Prompts]:
    """A run with the reference."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = torch.tensor(prompts)
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    whole = torch.ones_like(given)

    def run() -> Prompts:
        out = model.generate(given, attention_mask=whole, pad_token_id=0, **options)
        new: Prompts = out[:, given.shape[1] :].tolist()
        return new

    return run


def with_outpace(llm: LLM, prompts: Prompts, tokens: int) -> Callable[[], Prompts]:
    """The same run here."""
    return lambda: [output.ids for output in llm.generate(prompts, max_tokens=tokens)]


def decode_seconds(llm: LLM, ids: list[int], tokens: int, profiler: profile | None) -> float:
    """Wall seconds of a decode after its prefill."""
    answer = llm.submit(ids, max_tokens=tokens)
    llm.driver.step()
    if profiler is not None:
        profiler.start()
    began = time.perf_counter()
    while not answer.is_finished:
        llm.driver.step()
    seconds = time.perf_counter() - began
    if profiler is not None:
        profiler.stop()
    return seconds


@contextmanager
def recorded() -> Iterator[None]:
    """Let the profiler see compiled products and attention, which are no operators of PyTorch."""
    loaded = load_library()
    names = ("outpace_multiply", "outpace_attend") if loaded else ()
    before = {name: getattr(loaded, name) for name in names}

    def recording(name: str) -> Callable[..., object]:
        def call(*given: object) -> object:
            with record_function(name):
                return before[name](*given)

        return call

    for name in names:
        setattr(loaded, name, recording(name))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(loaded, name, function)


def product_shares(llm: LLM, ids: list[int], tokens: int, rounds: int) -> tuple[float, float]:
    """Shares (a) and (b) of matrix products and attention, medians over the rounds."""
    within, beside = [], []
    for _ in range(rounds + 1):
        plain = decode_seconds(llm, ids, tokens, None)
        profiler = profile(activities=[ProfilerActivity.CPU], acc_events=True)
        with recorded():
            profiled = decode_seconds(llm, ids, tokens, profiler)
        events = [event for event in profiler.key_averages() if PRODUCTS.fullmatch(event.key)]
        products = sum(event.self_cpu_time_total for event in events) / 1e6
        within.append(products / profiled)
        beside.append(products / plain)
    return statistics.median(within[1:]), statistics.median(beside[1:])


def compare(
    name: str, size: Size, batch: int, tokens: int, rounds: int
) -> tuple[Row, list[Bar], LLM]:
    """Measure one size with so many prompts at a time."""
    prompts = [prompt(PROMPT, size.config["vocab_size"], seed) for seed in range(batch)]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), size.config)
        llm = load(folder)
        theirs = with_transformers(Path(folder), prompts, tokens)
    ours = with_outpace(llm, prompts, tokens)
    assert ours() == theirs(), f"{name}, batch {batch}: the outputs differ"
    timings = alternate({"ours": ours, "transformers": theirs}, rounds)
    pair = timings["ours"], timings["transformers"]
    row: Row = {"model": name, "batch": batch}
    for side, runs in timings.items():
        row[f"{side}: CPU ms"] = median(runs) / tokens * 1e3
        row["wall ms" if side == "ours" else "wall ms "] = median(runs, "wall") / tokens * 1e3
    row |= {"CPU ratio": ratio(*pair), "wall ratio": ratio(*pair, "wall"), "range": spread(*pair)}
    what, limit = f"{name}, batch {batch}: CPU ratio", size.limits.get(batch)
    bars = [] if limit is None else [Bar(what=what, value=row["CPU ratio"], limit=limit)]
    return row, bars, llm


def alone(name: str, size: Size, tokens: int, rounds: int) -> tuple[Row, list[Bar]]:
    """Measure one size with one prompt, and what of that are products and attention."""
    row, bars, llm = compare(name, size, 1, tokens, rounds)
    ids = prompt(PROMPT, size.config["vocab_size"])
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
    parser.add_argument("--batch", type=int, nargs="*", default=BATCHES, help="prompts at a time")
    options = parser.parse_args()
    prepare(options)
    disable_progress_bar()
    rows: list[Row] = []
    together: list[Row] = []
    bars: list[Bar] = []
    for name, size in SIZES.items():
        row, marks = alone(name, size, options.tokens, options.rounds)
        rows.append(row)
        bars += marks
        for batch in options.batch:
            tokens, rounds = max(options.tokens // 2, 1), max(options.rounds // 3, 1)
            row, marks, _ = compare(name, size, batch, tokens, rounds)
            together.append(row)
            bars += marks
    show("cost of a forward, one prompt", rows)
    show("cost of a forward, several prompts together", together)
    finish(options, {"forward_cost": rows, "batches": together}, bars)


if __name__ == "__main__":
    main()
