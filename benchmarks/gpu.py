"""What only a CUDA machine can tell, in one call of less than ten minutes.

1. kernels: attention and reads by the Triton kernels against the reference, first whether they
   agree, in every dtype, then milliseconds of both, and what is read per second beside a copy.
2. equality: greedy tokens of every method on the zoo's models, float32 on the GPU against float32
   on the CPU, a batch against its requests alone, and prompts found in the prefix cache against
   prompts computed; the share of bfloat16 tokens that are those of float32.
3. zoo: tokens per second and per forward of every method, bfloat16, at several batch sizes, with
   the share of problems solved where the models are trained.
4. size: milliseconds per forward of random models of the shapes of Qwen2.5-1.5B and 7B, bfloat16,
   autoregressive, with WeDLM's window of 16, and with APD as Dream of the same shape beside a
   verifier of Qwen2.5-0.5B's; also the gigabytes of weights that a target forward reads per
   second. Prompts of 128 tokens.

Cases that do not fit into the time are left out and counted. On a machine without CUDA it says so
and ends; `--cpu-smoke` runs the same with tiny sizes on the CPU, to test the program (the kernels
by Triton's interpreter, under TRITON_INTERPRET=1).

    python benchmarks/gpu.py --json benchmarks/results/gpu.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

import kernels
from checkpoints import TINY_AR, TINY_AUX, Config, dream, prompt, qwen2, wedlm
from curve import Point
from harness import Bar, Row, arguments, finish, prepare, save, show
from kernels import Sizes
from methods import POINTS
from outpace import LLM, Output
from outpace.engine.engine import Engine
from outpace.engine.pairing import Pairing
from outpace.engine.runner import Runner
from outpace.evaluation.run import questions_of
from outpace.methods import APD, Autoregressive, LeftToRight, Method, WeDLM
from outpace.models.load import translate
from outpace.models.transformer import Transformer
from outpace.options import Options

UNTIED = {"tie_word_embeddings": False}  # with tied random weights every token predicts itself
QWEN_1B = {**qwen2(1536, 28, 12, 2, 8960, 151_936), "max_position_embeddings": 4096}
QWEN_7B = {**qwen2(3584, 28, 28, 4, 18_944, 152_064), **UNTIED}
QWEN_AUX = qwen2(896, 24, 14, 2, 4864, 151_936)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is run."""

    device: str
    dtype: torch.dtype
    tokens: int
    batches: tuple[int, ...]
    equal: int
    shapes: dict[str, Config]
    verifier: Config
    shape_batches: tuple[int, ...]
    kernels: Sizes


FULL = Scale(
    device="cuda",
    dtype=torch.bfloat16,
    tokens=128,
    batches=(1, 8, 32, 128),
    equal=16,
    shapes={"1.5B": QWEN_1B, "7B": QWEN_7B},
    verifier=QWEN_AUX,
    shape_batches=(1, 8, 32),
    kernels=kernels.FULL,
)
SMOKE = Scale(
    device="cpu",
    dtype=torch.bfloat16,
    tokens=16,
    batches=(1, 2),
    equal=2,
    shapes={"tiny": TINY_AR},
    verifier=TINY_AUX,
    shape_batches=(1, 2),
    kernels=kernels.SMOKE,
)


Case = TypeVar("Case")


class Budget:
    """Gives out cases until the time is over."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.left_out = 0

    def spend(self, cases: Iterable[Case]) -> Iterator[Case]:
        """The cases for which there is time."""
        for case in cases:
            if time.monotonic() < self.end:
                yield case
            else:
                self.left_out += 1


UNLIMITED = [
    Point("left to right", "no window", "tiny-dream", LeftToRight()),
    Point("APD", "no window", "tiny-dream", APD(verifier="tiny-aux")),
]
CASES = {f"{p.kind}, {p.setting}".removesuffix(", "): p for p in [*POINTS, *UNLIMITED]}
"""Every method on the model of the zoo that it decodes."""


def load(point: Point, device: str, dtype: torch.dtype, prefix_cache: bool = False) -> LLM:
    """A method on a zoo model; a gigabyte holds all requests."""
    return LLM(
        point.model,
        point.method,
        device=device,
        dtype=dtype,
        prefix_cache=prefix_cache,
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


def equality(scale: Scale, budget: Budget) -> tuple[list[Row], list[Bar]]:
    """Greedy tokens of a device and a batch against the CPU and alone."""
    rows, bars = [], []
    for name, point in budget.spend(CASES.items()):
        reference = load(point, "cpu", torch.float32)
        given = [question.prompt for question in questions_of("story", scale.equal)]
        options = Options(max_tokens=scale.tokens, temperature=0.0)
        wanted = reference.generate(given, **options)
        exact = load(point, scale.device, torch.float32)
        batched = exact.generate(given, **options)
        alone = [exact.generate([one], **options)[0] for one in given[:4]]
        sharing = load(point, scale.device, torch.float32, prefix_cache=True)
        found = [sharing.generate(given, **options) for _ in range(2)][1]
        short = load(point, scale.device, scale.dtype).generate(given, **options)
        row: Row = {
            "method": name,
            "tokens": sum(len(output.ids) for output in wanted),
            "float32 as on the CPU": agreeing(batched, wanted),
            "batch as alone": agreeing(batched[:4], alone),
            "found as computed": agreeing(found, batched),
            "bfloat16 as float32": agreeing(short, wanted),
        }
        rows.append(row)
        for column in ("float32 as on the CPU", "batch as alone", "found as computed"):
            bars.append(Bar(what=f"{name}: {column}", value=row[column], limit=1.0, at_least=True))
    return rows, bars


def speed(scale: Scale, budget: Budget) -> list[Row]:
    """Tokens per second of every method at every batch size."""
    cases = [(name, batch) for name in CASES for batch in scale.batches]
    loaded: dict[str, LLM] = {}
    rows = []
    for name, batch in budget.spend(cases):
        llm = loaded.get(name) or load(CASES[name], scale.device, scale.dtype)
        loaded[name] = llm
        questions = questions_of("story", batch)
        given = [question.prompt for question in questions]
        llm.generate(given, max_tokens=8)
        began = time.perf_counter()
        outputs = llm.generate(given, max_tokens=scale.tokens)
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
                "solved": sum(bool(question.right(o.text)) for question, o in pairs) / batch,
            }
        )
    return rows


def random_runner(name: str, config: Config, slots: int, scale: Scale) -> Runner:
    """A model with random weights and its cache, made on the device."""
    with torch.device(scale.device):
        model = Transformer(translate(config)).to(scale.dtype)
    model.eval().requires_grad_(False)
    return Runner(name, model, slots=slots, prefix_cache=False)


def cost(method: Method, runners: dict[str, Runner], batch: int, tokens: int) -> Row:
    """Median milliseconds per forward of each model, after the first one."""
    engine = Engine()
    for runner in runners.values():
        engine.add(runner)
    pairing = Pairing.of(runners)

    def run(tokens: int) -> list[list[float]]:
        given = [prompt(128, pairing.vocab, seed) for seed in range(batch)]
        jobs = [
            engine.enter(
                engine.job(method, ids, pairing=pairing, max_tokens=tokens, eos=frozenset())
            )
            for ids in given
        ]
        while engine.step():
            pass
        assert all(job.error is None for job in jobs), jobs[0].error
        trace = jobs[0].request.trace
        return [[step.seconds for step in trace if step.model == role][1:] for role in runners]

    run(8)
    passes = run(tokens)
    target = runners["target"]
    weights = dict(target.model.named_parameters())
    if not target.config.tied:
        del weights["embedding.weight"]  # of which only single rows are read
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    middle = [statistics.median(times) for times in passes]
    return {
        "target ms": middle[0] * 1e3,
        "verifier ms": middle[1] * 1e3 if len(middle) > 1 else None,
        "target GB/s": size / 1e9 / middle[0],
        "forwards": len(passes[0]) + 1,
    }


def shapes(scale: Scale, budget: Budget) -> list[Row]:
    """Cost of a forward of large random models."""
    rows = []
    for name, config in budget.spend(scale.shapes.items()):
        for kind, make in {"autoregressive": causal, "wedlm": masked, "apd": diffusion}.items():
            method, runners = make(config, scale)
            for batch in budget.spend(scale.shape_batches):
                where = {"shape": name, "method": kind, "batch": batch}
                rows.append(where | cost(method, runners, batch, scale.tokens // 2))
            del runners
    return rows


Make = Callable[[Config, Scale], tuple[Method, dict[str, Runner]]]


def causal(config: Config, scale: Scale) -> tuple[Method, dict[str, Runner]]:
    """Autoregressive decoding of a random model."""
    slots = (128 + scale.tokens) * max(scale.shape_batches)
    return Autoregressive(), {"target": random_runner("target", config, slots, scale)}


def masked(config: Config, scale: Scale) -> tuple[Method, dict[str, Runner]]:
    """WeDLM with a random model of the same shape; one token per forward."""
    slots = (128 + scale.tokens + 16) * max(scale.shape_batches)
    return WeDLM(window=16, entropy=None), {
        "target": random_runner("target", wedlm(config), slots, scale)
    }


def diffusion(config: Config, scale: Scale) -> tuple[Method, dict[str, Runner]]:
    """APD with a random model of that shape as Dream; at ratio 0 it keeps one token per pass."""
    slots = (128 + scale.tokens) * max(scale.shape_batches)
    verifier = {**scale.verifier, **UNTIED}
    return APD(verifier="verifier", ratio=0.0), {
        "target": random_runner("target", dream(config), slots, scale),
        "verifier": random_runner("verifier", verifier, slots, scale),
    }


def measure(options: argparse.Namespace, scale: Scale) -> None:
    """Run all parts, writing the result after each."""
    budget = Budget(options.minutes)
    tables, agreed = kernels.compare(scale.kernels, scale.device, scale.dtype, budget.spend)
    for name, rows in tables.items():
        show(name, rows)
    save(options, tables, agreed)
    tables["equality"], bars = equality(scale, budget)
    bars = agreed + bars
    show("share of equal tokens", tables["equality"])
    save(options, tables, bars)
    tables["zoo"] = speed(scale, budget)
    show("zoo", tables["zoo"])
    save(options, tables, bars)
    tables["size"] = shapes(scale, budget)
    show("size", tables["size"])
    if budget.left_out:
        print(f"out of time: {budget.left_out} cases left out")
    finish(options, tables, bars)


def main() -> None:
    """Measure on CUDA, or try the program out on the CPU."""
    parser = arguments(__doc__, rounds=None, threads=None)
    parser.add_argument("--minutes", type=float, default=8, help="time for all cases (8)")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args()
    if not options.cpu_smoke and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: run on a machine with one, or try --cpu-smoke")
    prepare(options)
    measure(options, SMOKE if options.cpu_smoke else FULL)


if __name__ == "__main__":
    main()
