"""Tokens per second of whole answers on Qwen3-8B's shape, beside transformers and vLLM.

Prompts of so many tokens, decoded greedily by a causal model of random weights, all of a batch at
a time; the prompts are computed within the time. Each side has weights of its own: what they say
differs, and costs the same. vLLM is asked in a process of its own, where it is installed; what it
takes to start is not counted, but has to fit into the time that is left.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoints import Config, prompt
from gpu_parts.device import Found, Setup, Where, clear, shrunk, timed
from gpu_parts.shapes import IDS, TARGETS
from harness import Budget, Row
from outpace.engine.engine import Engine
from outpace.engine.job import Job
from outpace.engine.pairing import Pairing
from outpace.methods import Autoregressive

SHAPE = "Qwen3-8B"
Run = Callable[[list[list[int]]], object]
"""Answers prompts together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How much is answered: so many requests at a time, and tokens of each."""

    batches: tuple[int, ...]
    prompt: int
    tokens: int

    def prompts(self, batch: int) -> list[list[int]]:
        """Prompts of a batch."""
        return [prompt(self.prompt, IDS, seed) for seed in range(batch)]


FULL_SIZES = Answers(batches=(1, 8, 32, 64), prompt=128, tokens=64)
TINY_SIZES = Answers(batches=(1, 2), prompt=16, tokens=4)


def with_outpace(where: Where, sizes: Answers) -> Run:
    """A run here."""
    slots = max(sizes.batches) * (sizes.prompt + sizes.tokens + 16)
    runner = where.runner("target", where.model(TARGETS[SHAPE]), slots)
    engine, pairing = Engine(), Pairing.from_runners({"target": runner})
    engine.add_runner(runner)

    def run(prompts: list[list[int]]) -> None:
        jobs = [
            Job(method=Autoregressive(), pairing=pairing, prompt=ids, max_tokens=sizes.tokens)
            for ids in prompts
        ]
        for job in jobs:
            engine.enqueue(engine.prepare_job(job))
        while engine.step():
            pass
        assert all(job.error is None for job in jobs), jobs[0].error

    return run


def config_of(where: Where) -> Config:
    """`config.json` as others read it."""
    return {**shrunk(TARGETS[SHAPE], where.most), "model_type": "qwen3"}


def with_transformers(where: Where, sizes: Answers) -> Run:
    """The same run with the reference."""
    published = config_of(where)
    config = AutoConfig.for_model(published.pop("model_type"), **published)
    with torch.device(where.device):
        model = AutoModelForCausalLM.from_config(config, dtype=where.dtype).eval()
    options = {"max_new_tokens": sizes.tokens, "min_new_tokens": sizes.tokens, "do_sample": False}

    def run(prompts: list[list[int]]) -> None:
        given = torch.tensor(prompts, device=where.device)
        whole = torch.ones_like(given)
        model.generate(given, attention_mask=whole, pad_token_id=0, **options)

    return run


SIDES = {"outpace": with_outpace, "transformers": with_transformers}

SERVED = """
import json, sys, time
from vllm import LLM, SamplingParams

folder, batches, length, tokens = sys.argv[1], *map(json.loads, sys.argv[2:])
llm = LLM(
    model=folder,
    load_format="dummy",
    skip_tokenizer_init=True,
    dtype="bfloat16",
    max_model_len=length + tokens,
    max_num_seqs=max(batches),
    enable_prefix_caching=False,
    gpu_memory_utilization=0.8,
)
options = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

def taken(batch):
    ids = [[(7 * seed + at) % 1000 for at in range(length)] for seed in range(batch)]
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": each} for each in ids], options, use_tqdm=False)
    return time.perf_counter() - began

for batch in batches:
    taken(batch)
    print("found", json.dumps([batch, min(taken(batch) for _ in range(2))]), flush=True)
"""
"""What vLLM runs; a line for each batch."""

FOUND = "found "
"""How such a line begins, among those of its log."""


def with_vllm(where: Where, sizes: Answers, budget: Budget) -> list[tuple[int, float]]:
    """Batches and their seconds by vLLM; none, and a line that says why, where it cannot run."""
    if where.device != "cuda" or find_spec("vllm") is None:
        print("vLLM is left out: there is none here")
        return []
    counts = [json.dumps(each) for each in (sizes.batches, sizes.prompt, sizes.tokens)]
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name, "log")
        (folder / "config.json").write_text(json.dumps(config_of(where)))
        try:
            with log.open("w") as file:  # and no pipe, which processes of its own would keep open
                subprocess.run(
                    [sys.executable, "-c", SERVED, name, *counts],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    check=True,
                    timeout=budget.left,
                )
        except subprocess.SubprocessError as error:
            print(f"{log.read_text()}vLLM is left out: {type(error).__name__}")
            budget.left_out += 1
        lines = [line for line in log.read_text().splitlines() if line.startswith(FOUND)]
    return [(batch, taken) for batch, taken in (json.loads(line[len(FOUND) :]) for line in lines)]


def row_of(side: str, batch: int, tokens: int, taken: float) -> Row:
    """A row of the table."""
    row: Row = {"shape": SHAPE, "side": side, "batch": batch, "seconds": taken}
    return row | {"tokens/s": batch * tokens / taken}


def measure(setup: Setup, sizes: Answers) -> Found:
    """Every side, by batch."""
    where, budget = setup.where, setup.budget
    rows = []
    for side, make in SIDES.items():
        run: Run | None = None
        for batch in budget.spend(sizes.batches):
            run = run or make(where, sizes)
            taken = timed(partial(run, sizes.prompts(batch)), rounds=2, calls=1)
            rows.append(row_of(side, batch, sizes.tokens, taken))
        del run
        clear()
    for _ in budget.spend(["vLLM"]):
        served = with_vllm(where, sizes, budget)
        rows += [row_of("vLLM", batch, sizes.tokens, taken) for batch, taken in served]
    return {"answers": rows}, []
