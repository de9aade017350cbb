"""Which layout of a matrix is the quickest on this machine, found by trying.

A layout is used only if its products are batch invariant: a row has the same bits, whatever rows
are beside it. That is tried as well, since libraries choose a kernel by the number of rows.

Layouts are timed in turns, on copies of a matrix that together exceed the caches of a processor:
so does a model, whose last matrices push its first ones out.
"""

from __future__ import annotations

import logging
import time
from functools import cache

import torch
from torch import Tensor

from outpace.kernels.matmul import LAYOUTS, bind_product, layouts
from outpace.kernels.tiles import Product

LOG = logging.getLogger(__name__)

ROWS = (1, 4, 16, 64)
"""Rows of the products that are tried."""

COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 129)
"""Numbers of rows that have to give the bits that they give among `MOST`."""

MOST = 256
"""Rows of the largest product that is tried."""

SMALL = 2**15
"""Elements below which a product costs less than its call, so that nothing is timed."""

COLD = 2**22
"""Bytes of all copies of a matrix; of a larger one so much is tried."""

WHOLE = 16
"""What the outputs that are tried are a multiple of, so that every layout takes them."""

TURNS = 5
"""How often each layout has its turn; the quickest turn counts."""

GAIN = 0.7
"""Part of the time of the usual layout below which another is chosen, so that chance does not."""


def quickest(weight: Tensor) -> str:
    """The quickest layout of a matrix `[out, in]` that is batch invariant; rows if none is."""
    outputs, inputs = weight.shape
    some = max(COLD // weight.itemsize // max(inputs, 1) // WHOLE, 1) * WHOLE
    shape, threads = (min(outputs, some), inputs), torch.get_num_threads()
    names = layouts(weight)
    while names:
        timed = len(names) > 1 and weight.numel() >= SMALL
        best = fastest(shape, weight.dtype, names) if timed else names[0]
        if is_batch_invariant(best, shape, weight.dtype, threads):
            return best
        names = tuple(name for name in names if name != best)
    return "rows"


def fastest(shape: tuple[int, int], dtype: torch.dtype, names: tuple[str, ...]) -> str:
    """The layout with the least time over all numbers of rows, which count alike.

    That is the first one, unless another gains much.
    """
    times = seconds(shape, dtype, tuple(sorted(names)), torch.get_num_threads())
    first = times[names[0]]

    def share(name: str) -> float:
        return sum(times[name][count] / first[count] for count in ROWS) / len(ROWS)

    best = min(names, key=share)
    return best if share(best) < GAIN else names[0]


@cache
def is_batch_invariant(
    layout: str, shape: tuple[int, int], dtype: torch.dtype, threads: int
) -> bool:
    """Whether products in a layout give a row the same bits beside any other rows.

    The first and the last rows of a product are multiplied again by themselves. Why a layout is
    left out is a line of the log.
    """
    generator = torch.Generator().manual_seed(0)
    weight = (16 * torch.randn(shape, generator=generator)).to(dtype)
    scale = torch.ones(shape[0]) if dtype == torch.int8 else None
    x = torch.randn(MOST, shape[1], generator=generator)
    x = x.to(dtype) if scale is None else x
    product = bind_product(LAYOUTS[layout](weight), None, scale)
    with torch.inference_mode():
        whole = product(x)
        for count in COUNTS:
            for rows in (slice(count), slice(-count, None)):
                if not torch.equal(product(x[rows]), whole[rows]):
                    told = (layout, dtype, *shape, count)
                    LOG.info("%s %s %s x %s are left out: %s rows alone have other bits", *told)
                    return False
    return True


@cache
def seconds(
    shape: tuple[int, int], dtype: torch.dtype, layouts: tuple[str, ...], threads: int
) -> dict[str, dict[int, float]]:
    """Seconds of a product in each layout, by its number of rows, with so many threads."""
    weight = torch.ones(shape, dtype=dtype)
    eight = dtype == torch.int8
    copies, scale = max(COLD // weight.nbytes, 1), torch.ones(shape[0]) if eight else None
    products = {
        name: [bind_product(LAYOUTS[name](weight.clone()), None, scale) for _ in range(copies)]
        for name in layouts
    }
    best = {name: dict.fromkeys(ROWS, float("inf")) for name in layouts}
    for count in ROWS:
        x = torch.ones(count, shape[1], dtype=torch.float32 if eight else dtype)
        for _ in range(TURNS):
            for name in layouts:
                best[name][count] = min(best[name][count], turn(x, products[name]))
    told = "; ".join(
        f"{name} {'/'.join(f'{1e6 * time:.0f}' for time in times.values())}"
        for name, times in best.items()
    )
    LOG.info("%s %s x %s, microseconds of %s rows: %s", dtype, *shape, ROWS, told)
    return best


@torch.inference_mode()
def turn(x: Tensor, products: list[Product]) -> float:
    """Seconds of a product, with copies of its matrix one after the other."""
    # On one thread its own clock stands still where other programs run.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    for product in products:
        product(x)
    return (clock() - began) / len(products)
