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
the streaming window it gives others. Their threshold of 0 takes one token a forward, as 1 does
here. Imported from a clone of Tencent/WeDLM, with transformers 4.54 to 4.56:

    python benchmarks/wedlm_official.py --official WeDLM \
        --json benchmarks/results/wedlm_official.json
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoints import SMALL_WEDLM, prompt, write
from harness import (
    Bar,
    Row,
    Timing,
    alternate,
    arguments,
    finish,
    median,
    prepare,
    ratio,
    show,
    spread,
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

    def __init__(self, clone: Path, folder: Path) -> None:
        sys.path.insert(0, str(clone))
        module: Any = importlib.import_module("hf_compat.modeling_wedlm")
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
    llm.engine.step()
    wall, cpu = time.perf_counter(), time.process_time()
    while not answer.job.done:
        llm.engine.step()
    return Timing(time.process_time() - cpu, time.perf_counter() - wall)


def steps(llm: LLM, options: argparse.Namespace) -> tuple[list[Row], list[Bar]]:
    """Milliseconds a forward of streaming windows and of single tokens."""
    ids = prompt(64, llm.config.vocab)
    methods: dict[str, Method] = {"autoregressive": Autoregressive()}
    for entropy in ENTROPIES:
        methods[f"W {WINDOW}, entropy {entropy}"] = WeDLM(window=WINDOW, entropy=entropy)
    outputs = {name: decode(llm, method, ids, options.tokens) for name, method in methods.items()}
    sides = {
        name: partial(after_prompt, llm, m, ids, options.tokens) for name, m in methods.items()
    }
    timings = alternate(sides, options.rounds, lambda run: run())
    rows, bars = [], []
    single = len(outputs["autoregressive"].steps) - 1
    for name, runs in timings.items():
        output = outputs[name]
        forwards = len(output.steps) - 1
        scale = single / forwards
        rows.append(
            {
                "side": name,
                "forwards": forwards,
                "rows a forward": sum(s.rows for s in output.steps[1:]) / forwards,
                "tokens a forward": output.tokens_per_forward,
                "CPU ms a forward": median(runs) / forwards * 1e3,
                "of a single token's": ratio(runs, timings["autoregressive"]) * scale,
                "tokens a CPU second": len(output.ids) / median(runs),
                "range of runs": spread(runs, timings["autoregressive"]),
            }
        )
        if name != "autoregressive":
            what = f"{name}: CPU of a forward over that of a single token"
            bars.append(Bar(what=what, value=rows[-1]["of a single token's"], limit=STEP_LIMIT))
    return rows, bars


def decoders(
    official: Official, llm: LLM, options: argparse.Namespace
) -> tuple[list[Row], list[Bar]]:
    """Tokens a CPU second at equal thresholds."""
    ids = prompt(64, llm.config.vocab)
    rows, bars = [], []
    for threshold in THRESHOLDS:
        rule = {"window": WINDOW, "confidence": threshold or 1.0}
        methods = {
            "block": WeDLM(**rule, block=True, clip=True),
            "streaming": WeDLM(**rule),
        }
        sides: dict[str, Run] = {
            "official": partial(official.run, ids, options.tokens, threshold),
            **{name: partial(counted, llm, m, ids, options.tokens) for name, m in methods.items()},
        }
        results = {name: run() for name, run in sides.items()}
        assert results["block"] == results["official"], f"{threshold}: the outputs differ"
        timings = alternate(sides, max(options.rounds // 3, 1))
        for name, runs in timings.items():
            tokens, forwards = results[name]
            faster = 1 / ratio(runs, timings["official"])
            rows.append(
                {
                    "threshold": threshold,
                    "side": name,
                    "tokens": len(tokens),
                    "forwards": forwards,
                    "CPU ms a forward": median(runs) / forwards * 1e3,
                    "tokens a CPU second": len(tokens) / median(runs),
                    "times theirs": faster,
                    "range of runs": spread(timings["official"], runs),
                }
            )
            if name != "official":
                what = f"threshold {threshold}, {name}: tokens a CPU second over theirs"
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
    with tempfile.TemporaryDirectory() as folder:
        # Neither side may say end or mask: their logits stay far below the best ones.
        mute = SMALL_WEDLM["eos_token_id"], SMALL_WEDLM["mask_token_id"]
        model = write(Path(folder) / "model", SMALL_WEDLM, mute=mute, peak=PEAK)
        llm = LLM(model, device="cpu", dtype="float32", cache_gib=0.25, prefix_cache=False)
        tables: dict[str, list[Row]] = {}
        tables["steps"], bars = steps(llm, options)
        show("one forward", tables["steps"])
        if options.official is not None:
            official = Official(options.official, model)
            tables["decoders"], more = decoders(official, llm, options)
            bars += more
            show("decoders at equal thresholds", tables["decoders"])
    finish(options, tables, bars)


if __name__ == "__main__":
    main()
