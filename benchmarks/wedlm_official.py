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
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkpoints import SMALL_WEDLM, load, prompt, silenced, write
from harness import Bar, Row, Timing, alternate, costs, imported, median
from official import Decode, Measured, Result, compare, ours, parser_for, run_comparison
from outpace import LLM
from outpace.methods import Autoregressive, Method, WeDLM

WINDOW = 16
PEAK = 16.0
ENTROPIES = (None, 1.0, 2.0)
THRESHOLDS = (0.0, 0.5, 0.7, 0.9)
STEP_LIMIT, SPEED_LIMIT = 2.0, 4.0


class Official:
    """The authors' model and its block decoding."""

    def __init__(self, module: Any, folder: Path) -> None:
        kind = module.WeDLMForCausalLM
        self.model = kind.from_pretrained(folder, attn_implementation="sdpa").float().eval()

    def run(self, tokens: int, threshold: float) -> Decode:
        """A decode in blocks of the window's size."""

        @torch.inference_mode()
        def decode(ids: list[int]) -> tuple[list[int], int]:
            out = self.model.generate_wedlm(
                torch.tensor([ids]),
                max_new_tokens=tokens,
                block_size=WINDOW,
                confidence_threshold=threshold,
            )
            return out["sequences"][0, len(ids) :].tolist(), out["stats"]["total_steps"]

        return decode


def after_prompt(llm: LLM, method: Method, ids: list[int], tokens: int) -> Timing:
    """Time of a decode without its first forward."""
    answer = llm.submit(ids, method=method, max_tokens=tokens)
    llm.driver.step()
    wall, cpu = time.perf_counter(), time.process_time()
    while not answer.is_finished:
        llm.driver.step()
    return Timing(time.process_time() - cpu, time.perf_counter() - wall)


def steps(llm: LLM, options: argparse.Namespace) -> tuple[list[Row], list[Bar]]:
    """Milliseconds per forward of streaming windows and of single tokens, without the prompt's."""
    ids = prompt(64, llm.config.vocab)
    methods: dict[str, Method] = {"autoregressive": Autoregressive()}
    for entropy in ENTROPIES:
        methods[f"W {WINDOW}, entropy {entropy}"] = WeDLM(window=WINDOW, entropy=entropy)
    outputs = {
        name: llm.generate([ids], method=method, max_tokens=options.tokens)[0]
        for name, method in methods.items()
    }
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


def speed_of(result: Result, timings: Sequence[Timing]) -> Row:
    """Tokens, and how many of them in a CPU second."""
    tokens = sum(map(len, result[0]))
    return {"tokens": tokens, "tokens per CPU second": tokens / median(timings)}


def decoders(
    official: Official, llm: LLM, options: argparse.Namespace
) -> tuple[list[Row], list[Bar]]:
    """Tokens per CPU second at equal thresholds."""
    ids = [prompt(64, llm.config.vocab)]
    rows, bars = [], []
    for threshold in THRESHOLDS:
        sure = threshold or 1.0
        block = WeDLM(window=WINDOW, confidence=sure, block=True, clip=True)
        decodes = {
            "official": official.run(options.tokens, threshold),
            "block": ours(llm, block, options.tokens),
            "streaming": ours(llm, WeDLM(window=WINDOW, confidence=sure), options.tokens),
        }
        compared = compare(
            {"threshold": threshold},
            decodes,
            ids,
            max(options.rounds // 3, 1),
            "forward",
            same=["block"],
            columns=speed_of,
        )
        for row in compared:
            faster = 1 / row["CPU ratio of decodes"]
            rows.append({**row, "times theirs": faster})
            if row["side"] != "official":
                what = f"threshold {threshold}, {row['side']}: tokens per CPU second over theirs"
                bars.append(Bar(what=what, value=faster, limit=SPEED_LIMIT, at_least=True))
    return rows, bars


def measure(options: argparse.Namespace, module: Any, folder: Path) -> Measured:
    """Steps, and decoders where there is a clone."""
    model = write(folder, SMALL_WEDLM, mute=silenced(SMALL_WEDLM), peak=PEAK)
    llm = load(model)
    rows, bars = steps(llm, options)
    tables = {"steps": rows}
    if module is not None:
        tables["decoders"], more = decoders(Official(module, model), llm, options)
        bars += more
    return tables, bars


def main() -> None:
    """Measure steps, and decoders where there is a clone."""
    repository = "Tencent/WeDLM"
    run_comparison(
        parser_for(__doc__, repository, rounds=9, required=False),
        lambda clone: imported(clone, "hf_compat.modeling_wedlm", repository),
        measure,
        {"steps": "one forward", "decoders": "decoders at equal thresholds"},
    )


if __name__ == "__main__":
    main()
