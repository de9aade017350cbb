"""WeDLM beside one-token decoding of the same weights, and beside its authors' decoder for CPUs.

A model of 512 x 8 layers in Qwen3's shape (8 heads, 4 of them for keys; 8192 tokens), random
weights with a sharp head, prompt of 64 tokens, 128 new ones, float32, batch 1, greedy. Times are
CPU seconds of the process; the sides take turns.

*Steps.* One streaming forward of W = 16 (16 masks, and the tokens filled since the last one)
against one forward of `Autoregressive` on the same weights. The forward that holds the prompt is
not timed.

*Decoders.* The authors publish an engine that needs CUDA, and `generate_wedlm` in `hf_compat`,
which runs anywhere: blocks filled by confidence, without a cache. The same rule here (`block`,
`clip`, `confidence`) gives the same tokens in the same number of forwards, which is asserted; with
the streaming window it gives others. Their threshold of 0 takes one token per forward, as 1 does
here. Imported from a clone of Tencent/WeDLM, with transformers 4.54 to 4.56:

    python benchmarks/wedlm_official.py --official WeDLM \
        --json benchmarks/results/wedlm_official.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkpoints import SMALL_WEDLM, load, prompt, silenced, write
from harness import (
    Bar,
    Row,
    Timing,
    alternate,
    arguments,
    costs,
    finish,
    imported,
    median,
    prepare,
    show,
)
from outpace import LLM, Output
from outpace.methods import Autoregressive, Method, WeDLM

WINDOW = 16
PEAK = 16.0
ENTROPIES = (None, 1.0, 2.0)
THRESHOLDS = (0.0, 0.5, 0.7, 0.9)
STEP_LIMIT, SPEED_LIMIT = 2.0, 4.0

Run = Callable[[], tuple[list[int], int]]
"""New tokens and number of forwards of a decode."""


class Official:
    """The authors' model and its block decoding."""

    def __init__(self, module: Any, folder: Path) -> None:
        kind = module.WeDLMForCausalLM
        self.model = kind.from_pretrained(folder, attn_implementation="sdpa").float().eval()

    @torch.inference_mode()
    def run(self, ids: list[int], tokens: int, threshold: float) -> tuple[list[int], int]:
        """A decode in blocks of the window's size."""
        out = self.model.generate_wedlm(
            torch.tensor([ids]),
            max_new_tokens=tokens,
            block_size=WINDOW,
            confidence_threshold=threshold,
        )
        return out["sequences"][0, len(ids) :].tolist(), out["stats"]["total_steps"]


def decode(llm: LLM, method: Method, ids: list[int], tokens: int) -> Output:
    """A decode here."""
    return llm.generate([ids], method=method, max_tokens=tokens)[0]


def after_prompt(llm: LLM, method: Method, ids: list[int], tokens: int) -> Timing:
    """Time of a decode without its first forward."""
    answer = llm.submit(ids, method=method, max_tokens=tokens)
    llm.driver.step()
    wall, cpu = time.perf_counter(), time.process_time()
    while not answer.job.over:
        llm.driver.step()
    return Timing(time.process_time() - cpu, time.perf_counter() - wall)


def steps(llm: LLM, options: argparse.Namespace) -> tuple[list[Row], list[Bar]]:
    """Milliseconds per forward of streaming windows and of single tokens, without the prompt's."""
    ids = prompt(64, llm.config.vocab)
    methods: dict[str, Method] = {"autoregressive": Autoregressive()}
    for entropy in ENTROPIES:
        methods[f"W {WINDOW}, entropy {entropy}"] = WeDLM(window=WINDOW, entropy=entropy)
    outputs = {name: decode(llm, method, ids, options.tokens) for name, method in methods.items()}
    forwards = {name: len(output.steps) - 1 for name, output in outputs.items()}
    sides = {
        name: partial(after_prompt, llm, m, ids, options.tokens) for name, m in methods.items()
    }
    timings = alternate(sides, options.rounds, lambda run: run())
    rows = [
        {
            "side": name,
            "rows per forward": sum(s.rows for s in outputs[name].steps[1:]) / forwards[name],
            "tokens per forward": outputs[name].tokens_per_forward,
            "tokens per CPU second": len(outputs[name].ids) / median(timings[name]),
            **cost,
        }
        for name, cost in costs(timings, forwards, "forward").items()
    ]
    what = "CPU of a forward over that of a single token"
    return rows, [
        Bar(what=f"{row['side']}: {what}", value=row["CPU ratio"], limit=STEP_LIMIT)
        for row in rows[1:]
    ]


def decoders(
    official: Official, llm: LLM, options: argparse.Namespace
) -> tuple[list[Row], list[Bar]]:
    """Tokens per CPU second at equal thresholds."""
    ids = prompt(64, llm.config.vocab)
    rows, bars = [], []
    for threshold in THRESHOLDS:
        sure = threshold or 1.0
        methods = {
            "block": WeDLM(window=WINDOW, confidence=sure, block=True, clip=True),
            "streaming": WeDLM(window=WINDOW, confidence=sure),
        }
        sides: dict[str, Run] = {
            "official": partial(official.run, ids, options.tokens, threshold),
            **{name: partial(counted, llm, m, ids, options.tokens) for name, m in methods.items()},
        }
        results = {name: run() for name, run in sides.items()}
        assert results["block"] == results["official"], f"{threshold}: the outputs differ"
        timings = alternate(sides, max(options.rounds // 3, 1))
        forwards = {name: count for name, (_, count) in results.items()}
        for name, cost in costs(timings, forwards, "forward").items():
            tokens, faster = len(results[name][0]), 1 / cost["CPU ratio of decodes"]
            where: Row = {"threshold": threshold, "side": name, "tokens": tokens}
            speed = {"tokens per CPU second": tokens / median(timings[name])}
            rows.append({**where, **speed, **cost, "times theirs": faster})
            if name != "official":
                what = f"threshold {threshold}, {name}: tokens per CPU second over theirs"
                bars.append(Bar(what=what, value=faster, limit=SPEED_LIMIT, at_least=True))
    return rows, bars


def counted(llm: LLM, method: Method, ids: list[int], tokens: int) -> tuple[list[int], int]:
    """Tokens and forwards of a decode here."""
    output = decode(llm, method, ids, tokens)
    return output.ids, output.forwards


def main() -> None:
    """Measure steps, and decoders where there is a clone."""
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--official", type=Path, help="clone of Tencent/WeDLM")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens (128)")
    options = parser.parse_args()
    prepare(options)
    module = options.official and imported(
        options.official, "hf_compat.modeling_wedlm", "Tencent/WeDLM"
    )
    tables: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write(Path(folder), SMALL_WEDLM, mute=silenced(SMALL_WEDLM), peak=PEAK)
        llm = load(model)
        tables["steps"], bars = steps(llm, options)
        show("one forward", tables["steps"])
        if module is not None:
            tables["decoders"], more = decoders(Official(module, model), llm, options)
            bars += more
            show("decoders at equal thresholds", tables["decoders"])
    finish(options, tables, bars)


if __name__ == "__main__":
    main()
