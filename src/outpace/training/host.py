"""Memory and speed of this computer's processor, for plans without a GPU."""

from __future__ import annotations

import os
import time

import torch

from outpace.training.plan import MAX_CARD_FRACTION, Plan
from outpace.training.report import format_duration
from outpace.training.units import format_gib

MATRIX_SIZE = 1024
"""Rows and columns of the timed matrix product."""

TIMED_TRIALS = 5
"""Number of timed products; the fastest counts."""


def describe_processor(plan: Plan) -> str:
    """Describe whether a run fits in this computer's memory, and a lower bound of its time.

    The time assumes that all operations run at the rate of a matrix product timed here.
    """
    available = memory_size()
    if available is None:
        fits = "a processor"
    else:
        verdict = (
            "is enough" if plan.device_bytes <= MAX_CARD_FRACTION * available else "is not enough"
        )
        fits = f"a processor whose {format_gib(available)} of memory {verdict}"
    rate = product_rate(torch.bfloat16 if plan.train.precision == "bf16" else torch.float32)
    seconds = plan.total_work / rate
    return (
        f"{fits}; at least {format_duration(seconds)} at {rate / 1e12:.2f} TFLOP per "
        "second, measured"
    )


def memory_size() -> int | None:
    """Return the bytes of memory of this computer; None if the system does not report them."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def product_rate(dtype: torch.dtype) -> float:
    """Measure operations per second of a product of two square matrices, on all threads."""
    matrix = torch.full((MATRIX_SIZE, MATRIX_SIZE), 0.5, dtype=dtype)
    durations = []
    for _ in range(TIMED_TRIALS + 1):  # the first one warms up
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        durations.append(time.perf_counter() - began)
    return 2 * MATRIX_SIZE**3 / min(durations[1:])
