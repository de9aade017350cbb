"""What a training needs of this computer, where no GPU runs it."""

from __future__ import annotations

import os
import time

import torch

from outpace.training.plan import FILLED, Plan, gib
from outpace.training.report import duration

SIZE = 1024
"""Rows and columns of the matrices whose product is timed."""

TRIALS = 5
"""Timed products, of which the fastest counts."""


def describe_processor(plan: Plan) -> str:
    """Whether a run fits in this computer's memory, and how long its processor takes.

    The rate is that of a matrix product that is timed here, and the time all operations of the run
    at that rate: a lower bound.
    """
    held = memory_size()
    if held is None:
        fits = "a processor"
    else:
        word = "holds" if plan.memory <= FILLED * held else "does not hold"
        fits = f"a processor whose {gib(held)} of memory {word} it"
    rate = product_rate(torch.bfloat16 if plan.train.precision == "bf16" else torch.float32)
    seconds = plan.train.steps * plan.work / rate
    return f"{fits}; at least {duration(seconds)} at {rate / 1e12:.2f} TFLOP per second, measured"


def memory_size() -> int | None:
    """Bytes of this computer's memory; None where the system does not report them."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def product_rate(dtype: torch.dtype) -> float:
    """Operations per second of a product of two square matrices, on all threads."""
    matrix = torch.full((SIZE, SIZE), 0.5, dtype=dtype)
    taken = []
    for _ in range(TRIALS + 1):  # the first one prepares
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        taken.append(time.perf_counter() - began)
    return 2 * SIZE**3 / min(taken[1:])
