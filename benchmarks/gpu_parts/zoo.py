"""The methods on the models of the zoo, which are trained: what they say, and how fast."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

import pace
from curve import Point
from gpu_parts.device import Found, Setup
from harness import Bar, Row
from methods import POINTS
from outpace import LLM, Output
from outpace.api.options import Options
from outpace.lab.run import questions_of
from outpace.methods import APD, LeftToRight, Method

UNLIMITED = [
    Point("left to right", "no window", "tiny-dream", LeftToRight()),
    Point("APD", "no window", "tiny-dream", APD(verifier="tiny-aux")),
]
CASES = {f"{p.kind}, {p.setting}".removesuffix(", "): p for p in [*POINTS, *UNLIMITED]}
"""Every method on the model of the zoo that it decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zoo:
    """How much is run.

    Attributes:
        tokens: most tokens of an answer.
        batches: requests at a time whose speed is measured.
        equal: requests whose tokens are compared.
        paced: requests at a time with which a `Pace` is measured, in so many `rounds`.
    """

    tokens: int
    batches: tuple[int, ...]
    equal: int
    paced: tuple[int, ...]
    rounds: int


FULL_SIZES = Zoo(tokens=64, batches=(1, 8, 32, 128), equal=16, paced=(1, 4, 16, 64), rounds=3)
TINY_SIZES = Zoo(tokens=16, batches=(1, 2), equal=2, paced=(1,), rounds=1)


def load(
    model: str,
    method: Method | None,
    device: str,
    dtype: torch.dtype,
    prefix_cache: bool = False,
    graphs: bool = False,
) -> LLM:
    """A model of the zoo; a gigabyte holds all requests."""
    return LLM(
        model,
        method,
        device=device,
        dtype=dtype,
        prefix_cache=prefix_cache,
        graphs=graphs,
        cache_gib=1,
        max_length=512,
    )


def agreeing(ours: list[Output], theirs: list[Output]) -> float:
    """Share of tokens before the first difference."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        pairs = list(zip(a.ids, b.ids, strict=False))
        differ = (index for index, (x, y) in enumerate(pairs) if x != y)
        same += next(differ, len(pairs))
        total += max(len(a.ids), len(b.ids))
    return same / total if total else 1.0


def equality(setup: Setup, zoo: Zoo) -> Found:
    """Greedy tokens of a device and a batch against the CPU and alone."""
    device, dtype = setup.where.device, setup.where.dtype
    rows, bars = [], []
    for name, point in setup.budget.spend(CASES.items()):
        made = partial(load, point.model, point.method)
        reference = made("cpu", torch.float32)
        given = [question.prompt for question in questions_of("story", zoo.equal)]
        options = Options(max_tokens=zoo.tokens, temperature=0.0)
        wanted = reference.generate(given, **options)
        exact = made(device, torch.float32)
        batched = exact.generate(given, **options)
        alone = [exact.generate([one], **options)[0] for one in given[:4]]
        sharing = made(device, torch.float32, prefix_cache=True)
        found = [sharing.generate(given, **options) for _ in range(2)][1]
        short = made(device, dtype).generate(given, **options)
        exactly = ["float32 as on the CPU", "batch as alone", "found as computed"]
        row: Row = {
            "method": name,
            "tokens": sum(len(output.ids) for output in wanted),
            "float32 as on the CPU": agreeing(batched, wanted),
            "batch as alone": agreeing(batched[:4], alone),
            "found as computed": agreeing(found, batched),
            "bfloat16 as float32": agreeing(short, wanted),
        }
        if device == "cuda":
            again = made(device, torch.float32, graphs=True).generate(given, **options)
            row["graphs as launches"] = agreeing(again, batched)
            exactly.append("graphs as launches")
        rows.append(row)
        for column in exactly:
            bars.append(Bar(what=f"{name}: {column}", value=row[column], limit=1.0, at_least=True))
    return {"equality": rows}, bars


def speed(setup: Setup, zoo: Zoo) -> Found:
    """Tokens per second of every method at every batch size."""
    device, dtype = setup.where.device, setup.where.dtype
    cases = [(name, batch) for name in CASES for batch in zoo.batches]
    loaded: dict[str, LLM] = {}
    rows = []
    for name, batch in setup.budget.spend(cases):
        point = CASES[name]
        llm = loaded.get(name) or load(point.model, point.method, device, dtype)
        loaded[name] = llm
        questions = questions_of("story", batch)
        given = [question.prompt for question in questions]
        llm.generate(given, max_tokens=8)
        began = time.perf_counter()
        outputs = llm.generate(given, max_tokens=zoo.tokens)
        seconds = time.perf_counter() - began
        tokens = sum(len(output.ids) for output in outputs)
        forwards = sum(output.forwards for output in outputs)
        pairs = zip(questions, outputs, strict=True)
        rows.append(
            {
                "method": name,
                "batch": batch,
                "tokens/s": tokens / seconds,
                "tokens/s per request": statistics.mean(o.tokens_per_second for o in outputs),
                "tokens per forward": tokens / forwards if forwards else 0.0,
                "ms per forward": seconds / max(output.forwards for output in outputs) * 1e3,
                "solved": sum(bool(question.judge_answer(o.text)) for question, o in pairs) / batch,
            }
        )
    return {"zoo": rows}, []


def paced(setup: Setup, zoo: Zoo) -> Found:
    """Tokens per second of every method with `pace="auto"`, over autoregressive decoding.

    A diffusion model is held against the causal model of its size.
    """
    device, dtype = setup.where.device, setup.where.dtype
    llms: dict[str, LLM] = {}
    rows: list[Row] = []
    bars: list[Bar] = []
    for batch, (name, case) in setup.budget.spend(product(zoo.paced, pace.CASES.items())):
        llms = llms or pace.models_of(pace.CASES, lambda name: load(name, None, device, dtype))
        row, marks = pace.measure(
            name,
            case,
            llms,
            batch=batch,
            tokens=zoo.tokens,
            rounds=zoo.rounds,
            fixed=False,
            clock="wall",
            least=1.0,
        )
        rows.append(row)
        bars += marks
    return {"paced": rows}, bars
