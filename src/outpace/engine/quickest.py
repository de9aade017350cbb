"""Which layout of a matrix is the quickest on this machine, found by trying.

Layouts take turns, on copies of a matrix that together exceed what a processor keeps near: so does
a model, whose last matrices push its first ones out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

LOG = logging.getLogger(__name__)

ROWS = (1, 4, 16, 64)
"""Rows of the products that are tried."""

COLD = 2**22
"""Bytes of all copies of a matrix; of a larger one so much is tried."""

TURNS = 5
"""How often each layout has its turn; the quickest turn counts."""

MANY, STEP = 64, 16
"""Rows above which a product of blocks is filled up to a multiple of the step: oneDNN compiles a
kernel for each number of rows, which takes as long as a hundred, and keeps 1,024."""

GAIN = 0.7
"""Part of the time of the usual layout below which another is chosen, so that chance does not."""


def by_column(weight: Tensor) -> Tensor:
    """The same matrix, stored column by column."""
    return weight.t().contiguous().t()


def blocked(weight: Tensor) -> Tensor:
    """The same matrix in oneDNN's blocks."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, 32)


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "rows": Tensor.contiguous,
    "columns": by_column,
    "blocks": blocked,
}


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Map rows `x [T, in]` by a matrix in any layout.

    In float32 oneDNN is the quicker library row by row as well: twice as quick on an AMD EPYC.
    """
    packed = weight.is_mkldnn
    if not packed and (not weight.is_contiguous() or weight.dtype != torch.float32):
        return F.linear(x, weight, bias)
    rows = len(x)
    spare = -rows % STEP if rows > MANY else 0
    if spare:
        x = F.pad(x, (0, 0, 0, spare))
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out[:rows] if spare else out


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether this processor and this build of PyTorch have blocks for a dtype, and rightly."""
    rows, weight = torch.ones(2, 32, dtype=dtype), torch.eye(32, dtype=dtype)[:16]
    try:
        return torch.equal(product(rows, blocked(weight), None), F.linear(rows, weight))
    except (AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        LOG.info("%s is not packed on this machine (%s)", dtype, reason)
        return False


def quickest(weight: Tensor, layouts: tuple[str, ...], rows: tuple[int, ...]) -> str:
    """The layout with the least time over products of so many rows; the first if none gains much.

    Each number of rows counts alike.
    """
    if len(layouts) == 1:
        return layouts[0]
    shape = (min(len(weight), max(COLD // weight.itemsize // weight.shape[1], 1)), weight.shape[1])
    tried = tuple(sorted(layouts))
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
    copies = max(COLD // weight.nbytes, 1)
    laid = {name: [LAYOUTS[name](weight.clone()) for _ in range(copies)] for name in layouts}
    best = {name: dict.fromkeys(ROWS, float("inf")) for name in layouts}
    for count in ROWS:
        x = torch.ones(count, shape[1], dtype=dtype)
        for _ in range(TURNS):
            for name in layouts:
                best[name][count] = min(best[name][count], turn(x, laid[name]))
    told = "; ".join(
        f"{name} {'/'.join(f'{1e6 * time:.0f}' for time in times.values())}"
        for name, times in best.items()
    )
    LOG.info("%s %s x %s, microseconds of %s rows: %s", dtype, *shape, ROWS, told)
    return best


@torch.inference_mode()
def turn(x: Tensor, copies: list[Tensor]) -> float:
    """Seconds of a product, with copies one after the other."""
    # On one thread its own clock stands still where other programs run.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    for weight in copies:
        product(x, weight, None)
    return (clock() - began) / len(copies)
