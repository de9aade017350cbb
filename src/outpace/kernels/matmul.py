"""Layouts of a matrix in CPU memory, and products of rows with it in each layout.

An int8 matrix has a scale per output, and rows are quantized to 8 bits with a scale per row. Such a
product is a sum of integers and independent of their order. Results are therefore equal in all
layouts and batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.kernels import tiles

LOG = logging.getLogger(__name__)

MIN_PADDED_ROWS, ROW_MULTIPLE = 64, 16
"""Above the first number, rows are padded to a multiple of the second for products with blocks.
oneDNN compiles a kernel per number of rows, which takes as long as 100 products; it keeps 1,024."""

MAX_CODE, ZERO_CODE = 127, 128
"""The largest code of either sign, and the code of zero in a row."""

MIN_ROW_PEAK = 1e-30
"""Lower limit on the largest magnitude of a row, to avoid a scale of zero."""


def to_columns(weight: Tensor) -> Tensor:
    """Return the matrix in column-major order."""
    return weight.t().contiguous().t()


def to_blocks(weight: Tensor) -> Tensor:
    """Return the matrix in oneDNN's blocked layout."""
    if weight.dtype == torch.int8:
        return torch.ops.onednn.qlinear_prepack(weight, None)
    return torch.ops.mkldnn._reorder_linear_weight(weight, 32)


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "rows": Tensor.contiguous,
    "blocks": to_blocks,
    "tiles": tiles.to_tiles,
}


def is_tiled(weight: Tensor) -> bool:
    """Return whether a matrix is in tiles."""
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
    """Multiply codes `u8[T, in]` by a row-major matrix `i8[out, in]`: slow, exact on any machine.

    Used for sizes that no fast layout supports.
    """
    product = (codes.double() - ZERO_CODE) @ weight.double().T
    return product.float().mul_(scale)


@cache
def zero_points(count: int) -> Tensor:
    """Return zeros `i32[count]`."""
    return torch.zeros(count, dtype=torch.int32)


@cache
def has_layout(layout: str, dtype: torch.dtype) -> bool:
    """Return whether this machine supports a layout of a dtype with correct products.

    Products are tested, in int8 with the largest sums, which saturate on processors without VNNI.
    The log records the reason if not. bfloat16 has no blocks: with AVX512, tiles are as fast or
    faster for any number of rows, and with AMX blocks are not batch invariant.
    """
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
    """Return whether products in a layout are correct."""
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
    """Return the fast layouts available for a matrix `[out, in]`, the default first."""
    names = ("tiles", "blocks") if tiles.can_tile(weight) else ("blocks",)
    return tuple(name for name in names if has_layout(name, weight.dtype))
