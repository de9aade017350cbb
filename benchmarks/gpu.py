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

Names of parts, such as `kernels` or `Qwen3-8B zoo`, run these alone. Cases that do not fit into the
time are left out and counted. Without CUDA the program ends with an error; `--cpu-smoke` runs the
same with tiny sizes on the CPU, to test the program (the kernels by Triton's interpreter, under
TRITON_INTERPRET=1).

    python benchmarks/gpu.py --json benchmarks/results/gpu.json
    python benchmarks/gpu.py kernels equality
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from gpu_parts import answers, kernels, steps, training, zoo
from gpu_parts.device import Card, Found, Setup, Where, clear
from gpu_parts.shapes import TARGETS, TINY
from harness import Bar, Budget, Row, arguments, finish, prepare, save, show


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much each part runs."""

    where: Where
    kernels: kernels.Sizes
    zoo: zoo.Zoo
    steps: steps.Steps
    lesson: training.Lesson
    answers: answers.Answers


FULL = Scale(
    where=Where(device="cuda", dtype=torch.bfloat16, most={}),
    kernels=kernels.FULL_SIZES,
    zoo=zoo.FULL_SIZES,
    steps=steps.FULL_SIZES,
    lesson=training.FULL_SIZES,
    answers=answers.FULL_SIZES,
)
SMOKE = Scale(
    where=Where(device="cpu", dtype=torch.bfloat16, most=TINY, copied=2**16, multiplied=64),
    kernels=kernels.TINY_SIZES,
    zoo=zoo.TINY_SIZES,
    steps=steps.TINY_SIZES,
    lesson=training.TINY_SIZES,
    answers=answers.TINY_SIZES,
)


def measure_shape(name: str, setup: Setup, scale: Scale) -> Found:
    """A published shape."""
    return steps.measure(setup, scale.steps, name)


PARTS: dict[str, Callable[[Setup, Scale], Found]] = {
    "kernels": lambda setup, scale: kernels.measure(setup, scale.kernels),
    "equality": lambda setup, scale: zoo.equality(setup, scale.zoo),
    **{name: partial(measure_shape, name) for name in TARGETS},
    "training": lambda setup, scale: training.measure(setup, scale.lesson),
    "paced": lambda setup, scale: zoo.paced(setup, scale.zoo),
    "zoo": lambda setup, scale: zoo.speed(setup, scale.zoo),
    "answers": lambda setup, scale: answers.measure(setup, scale.answers),
}
"""In order: where time is short, the last ones are left out."""


def measure(options: argparse.Namespace, scale: Scale) -> int:
    """Run the wanted parts, showing and writing what each found; how many failed."""
    budget = Budget(options.minutes)
    setup = Setup(scale.where, Card.of(scale.where), budget)
    tables: dict[str, list[Row]] = {"card": [setup.card.row]}
    bars: list[Bar] = []
    failed: list[Row] = []
    show("card", tables["card"])
    for name in options.parts or PARTS:
        try:
            found, marks = PARTS[name](setup, scale)
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
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all where none is named"
    )
    parser.add_argument("--minutes", type=float, default=8, help="time for all cases (8)")
    parser.add_argument("--graphs", action="store_true", help="run published shapes by graphs")
    parser.add_argument("--compile", action="store_true", help="compile layers of these shapes")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"unknown part {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    options.parts = [name for name in PARTS if name in options.parts]
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
        raise SystemExit(f"{failed} of {len(options.parts or PARTS)} parts failed, as said above")


if __name__ == "__main__":
    main()
