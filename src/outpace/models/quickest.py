"""Which layout of a matrix is the quickest on this machine, found by trying.

Layouts take turns, on copies of a matrix that together exceed what a processor keeps near: so does
a model, whose last matrices push its first ones out.
"""

from __future__ import annotations

import logging
import time
from functools import cache

import torch
from torch import Tensor

from outpace.models.layouts import LAYOUTS, product

LOG = logging.getLogger(__name__)

ROWS = (1, 4, 16, 64)
"""Rows of the products that are tried."""

COLD = 2**22
"""Bytes of all copies of a matrix; of a larger one so much is tried."""

WHOLE = 16
"""What the outputs that are tried are a multiple of, so that every layout takes them."""

TURNS = 5
"""How often each layout has its turn; the quickest turn counts."""

GAIN = 0.7
"""Part of the time of the usual layout below which another is chosen, so that chance does not."""


def quickest(weight: Tensor, layouts: tuple[str, ...], rows: tuple[int, ...] = ROWS) -> str:
    """The layout with the least time over products of so many rows; the first if none gains much.

    Each number of rows counts alike.
    """
    if len(layouts) == 1:
        return layouts[0]
    outputs, inputs = weight.shape
    some = max(COLD // weight.itemsize // inputs // WHOLE, 1) * WHOLE
    tried = tuple(sorted(layouts))
    shape = (min(outputs, some), inputs)
    times = seconds(shape, weight.dtype, tried, torch.get_num_threads())
    first = times[layouts[0]]

    def share(layout: str) -> float:
        return sum(times[layout][count] / first[count] for count in rows) / len(rows)

    best = min(layouts, key=share)
    return best if share(best) < GAIN else layouts[0]


@cache
def seconds(
    shape: tuple[int, int], dtype: torch.dtype, layouts: tuple[str, ...], threads: int
) -> dict[str, dict[int, float]]:
    """Seconds of a product in each layout, by its number of rows, with so many threads."""
    weight = torch.ones(shape, dtype=dtype)
    eight = dtype == torch.int8
    copies, scale = max(COLD // weight.nbytes, 1), torch.ones(shape[0]) if eight else None
    laid = {name: [LAYOUTS[name](weight.clone()) for _ in range(copies)] for name in layouts}
    best = {name: dict.fromkeys(ROWS, float("inf")) for name in layouts}
    for count in ROWS:
        x = torch.ones(count, shape[1], dtype=torch.float32 if eight else dtype)
        for _ in range(TURNS):
            for name in layouts:
                best[name][count] = min(best[name][count], turn(x, laid[name], scale))
    told = "; ".join(
        f"{name} {'/'.join(f'{1e6 * time:.0f}' for time in times.values())}"
        for name, times in best.items()
    )
    LOG.info("%s %s x %s, microseconds of %s rows: %s", dtype, *shape, ROWS, told)
    return best


@torch.inference_mode()
def turn(x: Tensor, copies: list[Tensor], scale: Tensor | None) -> float:
    """Seconds of a product, with copies one after the other."""
    # On one thread its own clock stands still where other programs run.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    for weight in copies:
        product(x, weight, None, scale)
    return (clock() - began) / len(copies)
