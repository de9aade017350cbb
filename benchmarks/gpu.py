"""What only a CUDA machine can tell, in one call of less than ten minutes.

First what must be equal, then what is judged, then what stands beside it:

1. card: gigabytes per second of a copy, and operations per second of a product of matrices. All
   shares below are of these.
2. attention and reads: the Triton kernels against the reference, first whether they agree, in every
   dtype, then milliseconds of both, and what is read per second beside a copy.
3. equality: greedy tokens of every method on the zoo's models, float32 on the GPU against float32
   on the CPU, a batch against its requests alone, and prompts found in the prefix cache against
   prompts computed, and passes that are recorded as graphs; the share of bfloat16 tokens that are
   those of float32.
4. steps, prefill and cycles: random models of the shapes of Qwen3-8B with drafts of DFlash, EAGLE-3
   and Qwen2.5-0.5B, Dream-7B with Qwen2.5-0.5B as verifier, LLaDA-8B and WeDLM-8B, in bfloat16. A
   step by batch and rows beside the time in which a copy moves what it reads; a prompt; the cycles
   of every method, as its paper sets it, and the share of them in which the device is idle. With
   `--graphs` passes are recorded and run in one launch, else kernel by kernel; with `--compile`
   layers are compiled.
5. projected: tokens per second that these cycles would bring with the tokens per forward that a
   paper says. No measurement: random weights keep nothing. D2F's and WeDLM's papers say none.
6. training: a step of DFlash's objective on Qwen3-8B's shape beside the rate of products.
7. paced: tokens per second of every method with pace="auto" over autoregressive decoding, of the
   zoo's models, since random ones have no proposals to keep.
8. zoo: tokens per second and per forward of every method as it is set, bfloat16, at several batch
   sizes, with the share of problems solved where the models are trained.
9. answers: whole answers on Qwen3-8B's shape, beside transformers' `generate` and, where it is
   installed, vLLM.

Cases that do not fit into the time are left out and counted. On a machine without CUDA it says so
and ends; `--cpu-smoke` runs the same with tiny sizes on the CPU, to test the program (the kernels
by Triton's interpreter, under TRITON_INTERPRET=1).

    python benchmarks/gpu.py --json benchmarks/results/gpu.json
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

import gpu_beside
import gpu_steps
import gpu_training
import gpu_zoo
import kernels
from gpu_beside import FULL_ANSWERS, TINY_ANSWERS, Answers
from gpu_shapes import TARGETS, TINY, Where, clear
from gpu_steps import FULL_STEPS, TINY_STEPS, Steps
from gpu_training import FULL_LESSON, TINY_LESSON, Lesson
from gpu_zoo import FULL_ZOO, TINY_ZOO, Zoo
from harness import Bar, Budget, Row, arguments, finish, prepare, save, show
from kernels import Card, Sizes

Found = tuple[dict[str, list[Row]], list[Bar]]
"""Tables by title, and bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is run."""

    where: Where
    kernels: Sizes
    zoo: Zoo
    steps: Steps
    lesson: Lesson
    answers: Answers


FULL = Scale(
    where=Where(device="cuda", dtype=torch.bfloat16, most={}),
    kernels=kernels.FULL,
    zoo=FULL_ZOO,
    steps=FULL_STEPS,
    lesson=FULL_LESSON,
    answers=FULL_ANSWERS,
)
SMOKE = Scale(
    where=Where(device="cpu", dtype=torch.bfloat16, most=TINY),
    kernels=kernels.SMOKE,
    zoo=TINY_ZOO,
    steps=TINY_STEPS,
    lesson=TINY_LESSON,
    answers=TINY_ANSWERS,
)


def of_kernels(scale: Scale, card: Card, budget: Budget) -> Found:
    """The kernels and the reference."""
    where = scale.where
    return kernels.compare(scale.kernels, where.device, where.dtype, card, budget.spend)


def of_equality(scale: Scale, card: Card, budget: Budget) -> Found:
    """Tokens of the zoo."""
    rows, bars = gpu_zoo.equality(scale.zoo, scale.where.device, scale.where.dtype, budget)
    return {"equality": rows}, bars


def of_shape(name: str, scale: Scale, card: Card, budget: Budget) -> Found:
    """A published shape."""
    return gpu_steps.measure(name, scale.steps, scale.where, card, budget)


def of_training(scale: Scale, card: Card, budget: Budget) -> Found:
    """DFlash's objective."""
    return gpu_training.measure(scale.lesson, scale.where, card, budget)


def of_paces(scale: Scale, card: Card, budget: Budget) -> Found:
    """Methods whose dial is turned."""
    rows, bars = gpu_zoo.paced(scale.zoo, scale.where.device, scale.where.dtype, budget)
    return {"paced": rows}, bars


def of_zoo(scale: Scale, card: Card, budget: Budget) -> Found:
    """Methods as they are set."""
    return {"zoo": gpu_zoo.speed(scale.zoo, scale.where.device, scale.where.dtype, budget)}, []


def of_answers(scale: Scale, card: Card, budget: Budget) -> Found:
    """Other programs."""
    return {"answers": gpu_beside.measure(scale.where, scale.answers, budget)}, []


PARTS: dict[str, Callable[[Scale, Card, Budget], Found]] = {
    "kernels": of_kernels,
    "equality": of_equality,
    **{name: partial(of_shape, name) for name in TARGETS},
    "training": of_training,
    "paced": of_paces,
    "zoo": of_zoo,
    "answers": of_answers,
}
"""In order: where time is short, the last ones are left out."""


def measure(options: argparse.Namespace, scale: Scale) -> int:
    """Run all parts, showing and writing what each found; how many failed."""
    budget = Budget(options.minutes)
    card = Card.of(scale.kernels, scale.where.device, scale.where.dtype)
    tables: dict[str, list[Row]] = {"card": [card.row]}
    bars: list[Bar] = []
    failed: list[Row] = []
    show("card", tables["card"])
    for name, part in PARTS.items():
        try:
            found, marks = part(scale, card, budget)
        except Exception as error:  # such as memory that is short: the others are measured still
            traceback.print_exc()
            failed.append({"part": name, "error": repr(error)})
            found, marks = {}, []
        for title, rows in found.items():
            show(title, rows)
            tables.setdefault(title, []).extend(rows)
        bars += marks
        save(options, tables, bars)
        clear()
    if budget.left_out:
        print(f"out of time: {budget.left_out} cases left out")
    finish(options, {**tables, "failed": failed}, bars)
    return len(failed)


def main() -> None:
    """Measure on CUDA, or try the program out on the CPU."""
    parser = arguments(__doc__, rounds=None, threads=None)
    parser.add_argument("--minutes", type=float, default=8, help="time for all cases (8)")
    parser.add_argument("--graphs", action="store_true", help="run published shapes by graphs")
    parser.add_argument("--compile", action="store_true", help="compile layers of these shapes")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args()
    if not options.cpu_smoke and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: run on a machine with one, or try --cpu-smoke")
    if options.cpu_smoke and (options.graphs or options.compile):
        raise SystemExit("--graphs and --compile want a CUDA device: a CPU tries neither")
    if options.cpu_smoke and options.threads is None:
        options.threads = 1  # more of them wait for one another longer than they compute
    prepare(options)
    scale = SMOKE if options.cpu_smoke else FULL
    where = replace(scale.where, graphs=options.graphs, compile=options.compile)
    scale = replace(scale, where=where)
    if failed := measure(options, scale):
        raise SystemExit(f"{failed} of {len(PARTS)} parts failed, as said above")


if __name__ == "__main__":
    main()
