"""Choice of the fastest matrix layout on this machine, by measurement.

A layout is used only if its products are batch invariant: the result of a row has the same bits
for any batch. This is tested as well, since libraries choose a kernel by the number of rows.

Layouts are timed alternately, on copies of a matrix that together exceed the processor's caches, as
the matrices of a model do.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor

from outpace.kernels.matmul import LAYOUTS, available_layouts, bind_product
from outpace.kernels.tiles import RowProduct
from outpace.measurements import MeasurementFile
from outpace.version import __version__

LOG = logging.getLogger(__name__)

LayoutTimes = dict[str, dict[int, float]]
"""Seconds of a product by layout and number of rows."""

TIMED_ROWS = (1, 4, 16, 64)
"""Numbers of rows in the timed products."""

TESTED_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 129)
"""Numbers of rows that must give the same bits as within `MAX_TESTED_ROWS` rows."""

MAX_TESTED_ROWS = 256
"""Number of rows in the largest tested product."""

MIN_TIMED_ELEMENTS = 2**15
"""Elements below which the call costs more than the product, so layouts are not timed."""

TIMED_BYTES = 2**22
"""Bytes of all copies of a matrix; larger matrices are timed by a slice of this size."""

OUTPUT_MULTIPLE = 16
"""Timed slices have a multiple of these outputs, which every layout supports."""

TIMING_ROUNDS = 5
"""Rounds of timing per layout; the fastest counts."""

MAX_TIME_RATIO = 0.7
"""Another layout must be below this fraction of the default's time, to exclude noise."""


def choose_layout(weight: Tensor) -> str:
    """Return the fastest batch-invariant layout of a matrix `[out, in]`; `rows` if none is."""
    outputs, inputs = weight.shape
    outputs_timed = (
        max(TIMED_BYTES // weight.itemsize // max(inputs, 1) // OUTPUT_MULTIPLE, 1)
        * OUTPUT_MULTIPLE
    )
    shape, threads = (min(outputs, outputs_timed), inputs), torch.get_num_threads()
    names = available_layouts(weight)
    while names:
        is_timed = len(names) > 1 and weight.numel() >= MIN_TIMED_ELEMENTS
        best = fastest_layout(shape, weight.dtype, names) if is_timed else names[0]
        if is_batch_invariant(best, shape, weight.dtype, threads):
            return best
        names = tuple(name for name in names if name != best)
    return "rows"


def fastest_layout(shape: tuple[int, int], dtype: torch.dtype, names: tuple[str, ...]) -> str:
    """Return the fastest layout, with equal weight for all numbers of rows.

    The first one is kept unless another is clearly faster.
    """
    times = time_layouts(shape, dtype, tuple(sorted(names)), torch.get_num_threads())
    first = times[names[0]]

    def mean_ratio(name: str) -> float:
        return sum(times[name][count] / first[count] for count in TIMED_ROWS) / len(TIMED_ROWS)

    best = min(names, key=mean_ratio)
    return best if mean_ratio(best) < MAX_TIME_RATIO else names[0]


@cache
def is_batch_invariant(
    layout: str, shape: tuple[int, int], dtype: torch.dtype, threads: int
) -> bool:
    """Return whether a row's product has the same bits in any batch.

    The first and the last rows of a product are multiplied again separately. The log records why
    a layout is excluded.
    """
    generator = torch.Generator().manual_seed(0)
    weight = (16 * torch.randn(shape, generator=generator)).to(dtype)
    scale = torch.ones(shape[0]) if dtype == torch.int8 else None
    x = torch.randn(MAX_TESTED_ROWS, shape[1], generator=generator)
    x = x.to(dtype) if scale is None else x
    product = bind_product(LAYOUTS[layout](weight), None, scale)
    with torch.inference_mode():
        whole = product(x)
        for count in TESTED_ROWS:
            for rows in (slice(count), slice(-count, None)):
                if not torch.equal(product(x[rows]), whole[rows]):
                    details = (layout, dtype, *shape, count)
                    LOG.info("%s %s %s x %s is not batch invariant for %s rows: not used", *details)
                    return False
    return True


@cache
def time_layouts(
    shape: tuple[int, int], dtype: torch.dtype, layouts: tuple[str, ...], threads: int
) -> LayoutTimes:
    """Return the seconds of a product per layout and number of rows, with `threads` threads.

    They are measured once per machine, and then read from the file of measurements.
    """
    build = f"PyTorch {torch.__version__}, outpace {__version__}"
    name = f"{dtype} {shape[0]} x {shape[1]}, {threads} threads, {', '.join(layouts)}, {build}"
    file = MeasurementFile.of_user()
    times = read_times(file.read_entry(name), layouts)
    if times is None:
        times = measure_layouts(shape, dtype, layouts)
        file.write_entries({name: {key: [*found.values()] for key, found in times.items()}})
    summary = "; ".join(
        f"{name} {'/'.join(f'{1e6 * time:.0f}' for time in found.values())}"
        for name, found in times.items()
    )
    LOG.info("%s %s x %s, microseconds of %s rows: %s", dtype, *shape, TIMED_ROWS, summary)
    return times


def read_times(entry: Any, layouts: tuple[str, ...]) -> LayoutTimes | None:
    """Return the times of an entry of the file; None if it has not all of them."""
    match entry:
        case dict() if entry.keys() == set(layouts) and all(map(is_times, entry.values())):
            return {name: dict(zip(TIMED_ROWS, entry[name], strict=True)) for name in layouts}
    return None


def is_times(value: Any) -> bool:
    """Return whether a value is a list of seconds, one per number of timed rows."""
    return (
        isinstance(value, list)
        and len(value) == len(TIMED_ROWS)
        and all(isinstance(each, float) and 0 < each < inf for each in value)
    )


def measure_layouts(
    shape: tuple[int, int], dtype: torch.dtype, layouts: tuple[str, ...]
) -> LayoutTimes:
    """Measure the seconds of a product per layout and number of rows."""
    weight = torch.ones(shape, dtype=dtype)
    is_int8 = dtype == torch.int8
    copies, scale = max(TIMED_BYTES // weight.nbytes, 1), torch.ones(shape[0]) if is_int8 else None
    products = {
        name: [bind_product(LAYOUTS[name](weight.clone()), None, scale) for _ in range(copies)]
        for name in layouts
    }
    best = {name: dict.fromkeys(TIMED_ROWS, float("inf")) for name in layouts}
    for count in TIMED_ROWS:
        x = torch.ones(count, shape[1], dtype=torch.float32 if is_int8 else dtype)
        for _ in range(TIMING_ROUNDS):
            for name in layouts:
                best[name][count] = min(best[name][count], time_products(x, products[name]))
    return best


@torch.inference_mode()
def time_products(x: Tensor, products: list[RowProduct]) -> float:
    """Return the mean seconds of a product, over copies of its matrix in sequence."""
    # On one thread, its CPU clock excludes the time of other programs.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for product in products:
        product(x)
    return (clock() - start) / len(products)
