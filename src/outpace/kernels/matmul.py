"""Layouts of a matrix in CPU memory, and products of rows with it in each layout.

An int8 matrix has a scale per output, and rows are quantized to 8 bits with a scale per row. Such a
product is a sum of integers and independent of their order. Results are therefore equal in all
layouts and batches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.kernels import tiles
from outpace.kernels.tiles import RowProduct
from outpace.measurements import MeasurementFile
from outpace.version import __version__

LOG = logging.getLogger(__name__)

MIN_PADDED_ROWS, ROW_MULTIPLE = 64, 16
"""Above the first number, rows are padded to a multiple of the second for products with blocks.
oneDNN compiles a kernel per number of rows, which takes as long as 100 products; it keeps 1,024."""

MAX_CODE, ZERO_CODE = 127, 128
"""The largest code of either sign, and the code of zero in a row."""

MIN_ROW_PEAK = 1e-30
"""Lower limit on the largest magnitude of a row, to avoid a scale of zero."""


def to_columns(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


def to_blocks(weight: Tensor) -> Tensor:
    if weight.dtype == torch.int8:
        return torch.ops.onednn.qlinear_prepack(weight, None)
    return torch.ops.mkldnn._reorder_linear_weight(weight, 32)


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "rows": Tensor.contiguous,
    "blocks": to_blocks,
    "tiles": tiles.to_tiles,
}


def is_tiled(weight: Tensor) -> bool:
    return weight.dim() == 4


def to_rows(weight: Tensor) -> Tensor:
    """Return a matrix of any layout in row-major order; int8 matrices of oneDNN stay blocked."""
    if is_tiled(weight):
        return tiles.from_tiles(weight)
    return weight.to_dense() if weight.is_mkldnn else weight.contiguous()


def bind_product(
    weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> tiles.RowProduct:
    """Return the product of rows `[T, in]` with a matrix in any layout, plus a bias.

    With the `scale f32[out]` of an int8 matrix, rows and result are float32. Bias and scale of
    tiles are always float32.
    """
    if is_tiled(weight):
        return tiles.bind_tile_product(weight, bias, scale)
    if scale is None:
        return partial(multiply, weight=weight, bias=bias)
    return partial(multiply_codes, weight=weight, scale=scale, bias=bias)


def multiply_codes(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows `x f32[T, in]` by an int8 matrix in rows or blocks, and add a bias."""
    codes, row_scale = quantize_rows(x)
    product = (multiply_blocks if weight.is_mkldnn else multiply_exactly)(
        codes, weight, scale
    ).mul_(row_scale)
    return product if bias is None else product.add_(bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows `x [T, in]` by a matrix in rows or blocks, and add a bias."""
    # In float32 oneDNN is faster for row-major matrices as well: twice as fast on an AMD EPYC.
    by_row = weight.dtype == torch.float32 and weight.is_contiguous()
    if not weight.is_mkldnn and not (by_row and has_layout("blocks", torch.float32)):
        return F.linear(x, weight, bias)
    rows = len(x)
    padding = -rows % ROW_MULTIPLE if rows > MIN_PADDED_ROWS else 0
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out[:rows] if padding else out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows `x [T, n]` to codes `u8[T, n]` and scales `f32[T, 1]`.

    The scale of a row with an infinity or NaN is NaN.
    """
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp_(min=MIN_ROW_PEAK).div_(MAX_CODE)
    bad = scale.isfinite().logical_not_()
    if bad.any():  # converting NaN to an integer is undefined
        x, scale = x.masked_fill(bad, 0), scale.masked_fill_(bad, 1)
    # Converting by int32, which processors support directly, is faster.
    codes = (x / scale).add_(ZERO_CODE + 0.5).to(torch.int32).to(torch.uint8)
    return codes, scale.masked_fill_(bad, torch.nan)


def multiply_blocks(codes: Tensor, blocks: Tensor, scale: Tensor) -> Tensor:
    """Multiply codes `u8[T, in]` by an int8 matrix in blocks, with a scale per output."""
    product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        *(codes, 1.0, ZERO_CODE, blocks, scale, zero_points(len(scale)), None),
        *(1.0, 0, torch.float32, "none", [], ""),
    )
    return product


def multiply_exactly(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply codes `u8[T, in]` by a matrix `i8[out, in]` of a size that no fast layout has."""
    product = (codes.double() - ZERO_CODE) @ weight.double().T
    return product.float().mul_(scale)


@cache
def zero_points(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)


@cache
def has_layout(layout: str, dtype: torch.dtype) -> bool:
    """Return whether this machine supports a layout of a dtype with correct products."""
    # Products are tested, in int8 with the largest sums, which saturate on processors without VNNI.
    # The log records the reason if not. bfloat16 has no blocks: with AVX512, tiles are as fast or
    # faster for any number of rows, and with AMX blocks are not batch invariant.
    if layout == "tiles" and not tiles.has_tile_loop(dtype):
        return False
    if layout == "blocks" and dtype == torch.bfloat16:
        return False
    try:
        if is_correct(LAYOUTS[layout], dtype):
            return True
        reason = "products are wrong"
    except (AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
    LOG.info("layout %s of %s is not used on this machine: %s", layout, dtype, reason)
    return False


def is_correct(lay: Callable[[Tensor], Tensor], dtype: torch.dtype) -> bool:
    if dtype != torch.int8:
        rows, weight = torch.ones(2, 32, dtype=dtype), torch.eye(32, dtype=dtype)[:16]
        return torch.equal(bind_product(lay(weight))(rows), F.linear(rows, weight))
    rows = torch.tensor([[MAX_CODE, -MAX_CODE] * 64, [MAX_CODE] * 128, [-MAX_CODE] * 128])
    # Published codes may be -128; ours are -127 or more.
    codes = [[MAX_CODE] * 128, [-MAX_CODE - 1] * 128, [MAX_CODE, -MAX_CODE] * 64, *[[1] * 128] * 13]
    weight = torch.tensor(codes, dtype=torch.int8)
    found = bind_product(lay(weight), None, torch.ones(len(weight)))(rows.float())
    return torch.equal(found, (rows @ weight.long().T).float())


def available_layouts(weight: Tensor) -> tuple[str, ...]:
    names = ("tiles", "blocks") if tiles.can_tile(weight) else ("blocks",)
    return tuple(name for name in names if has_layout(name, weight.dtype))


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
    """Return the fastest layout, with equal weight for all numbers of rows."""
    # The first one is kept unless another is clearly faster.
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
    """Return whether a row's product has the same bits in any batch."""
    # The first and the last rows of a product are multiplied again separately. The log records why
    # a layout is excluded.
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
    """Return the seconds of a product per layout and number of rows, with `threads` threads."""
    # They are measured once per machine, and then read from the file of measurements.
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
    return (
        isinstance(value, list)
        and len(value) == len(TIMED_ROWS)
        and all(isinstance(each, float) and 0 < each < inf for each in value)
    )


def measure_layouts(
    shape: tuple[int, int], dtype: torch.dtype, layouts: tuple[str, ...]
) -> LayoutTimes:
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
    # On one thread, its CPU clock excludes the time of other programs.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for product in products:
        product(x)
    return (clock() - start) / len(products)
