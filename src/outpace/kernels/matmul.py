"""How a matrix may lie in a CPU's memory, and products of rows with it in each layout.

A matrix of 8 bits has a scale for each output, and a row that meets it is rounded to 8 bits with a
scale of its own. Such a product is a sum of whole numbers, which is the same in any order: so the
numbers of a row are those that any layout gives, and the same beside any other rows.
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

MANY, STEP = 64, 16
"""Rows above which a product of blocks is filled up to a multiple of the step: oneDNN compiles a
kernel for each number of rows, which takes as long as a hundred, and keeps 1,024."""

LEVELS, NOUGHT = 127, 128
"""The largest code of either sign, and the code of a row that stands for nought."""

TINY = 1e-30
"""What the largest number of a row is at least, so that there is a scale."""


def by_column(weight: Tensor) -> Tensor:
    """The same matrix, stored column by column."""
    return weight.t().contiguous().t()


def blocked(weight: Tensor) -> Tensor:
    """The same matrix in oneDNN's blocks."""
    if weight.dtype == torch.int8:
        return torch.ops.onednn.qlinear_prepack(weight, None)
    return torch.ops.mkldnn._reorder_linear_weight(weight, 32)


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "rows": Tensor.contiguous,
    "blocks": blocked,
    "tiles": tiles.laid,
}


def is_tiled(weight: Tensor) -> bool:
    """Whether a matrix lies in tiles."""
    return weight.dim() == 4


def dense(weight: Tensor) -> Tensor:
    """A matrix row by row, that has any layout; what oneDNN made of 8 bits stays there."""
    if is_tiled(weight):
        return tiles.plain(weight)
    return weight.to_dense() if weight.is_mkldnn else weight.contiguous()


def bind_product(
    weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> tiles.Product:
    """The product of rows `[T, in]` with a matrix in any layout, plus a bias.

    With the `scale f32[out]` of a matrix of 8 bits, rows and result are float32. Bias and scale of
    tiles are float32 in any case.
    """
    if is_tiled(weight):
        return tiles.bind_product(weight, bias, scale)
    if scale is None:
        return partial(multiply, weight=weight, bias=bias)
    return partial(multiply_codes, weight=weight, scale=scale, bias=bias)


def multiply_codes(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Map rows `x f32[T, in]` by a matrix of 8 bits that is not in tiles, and add a bias."""
    codes, own = of_rows(x)
    whole = (of_codes if weight.is_mkldnn else of_plain)(codes, weight, scale).mul_(own)
    return whole if bias is None else whole.add_(bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Map rows `x [T, in]` by a matrix in rows or blocks, and add a bias."""
    # In float32 oneDNN is the quicker library row by row as well: twice as quick on an AMD EPYC.
    by_row = weight.dtype == torch.float32 and weight.is_contiguous()
    if not weight.is_mkldnn and not (by_row and has("blocks", torch.float32)):
        return F.linear(x, weight, bias)
    rows = len(x)
    spare = -rows % STEP if rows > MANY else 0
    if spare:
        x = F.pad(x, (0, 0, 0, spare))
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out[:rows] if spare else out


def of_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `u8[T, n]` of rows `x [T, n]`, and the scale `f32[T, 1]` of each.

    The scale of a row with an infinity or NaN is NaN.
    """
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp_(min=TINY).div_(LEVELS)
    bad = scale.isfinite().logical_not_()
    if bad.any():  # what becomes of NaN as a whole number is not defined
        x, scale = x.masked_fill(bad, 0), scale.masked_fill_(bad, 1)
    # Straight to 8 bits is slower than by a type that processors convert to.
    codes = (x / scale).add_(NOUGHT + 0.5).to(torch.int32).to(torch.uint8)
    return codes, scale.masked_fill_(bad, torch.nan)


def of_codes(codes: Tensor, blocks: Tensor, scale: Tensor) -> Tensor:
    """`f32[T, out]` of codes `u8[T, in]` and blocks of 8 bits, with a scale for each output."""
    whole: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        *(codes, 1.0, NOUGHT, blocks, scale, noughts(len(scale)), None),
        *(1.0, 0, torch.float32, "none", [], ""),
    )
    return whole


def of_plain(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The same with a matrix `i8[out, in]` row by row: slow, and exact on any machine.

    That is for sizes that no quick layout of a machine takes.
    """
    whole = (codes.double() - NOUGHT) @ weight.double().T
    return whole.float().mul_(scale)


@cache
def noughts(count: int) -> Tensor:
    """So many zeros `i32[count]`."""
    return torch.zeros(count, dtype=torch.int32)


@cache
def has(layout: str, dtype: torch.dtype) -> bool:
    """Whether this machine has a layout of matrices of a dtype, and multiplies rightly.

    That is tried, on the largest sums where there are 8 bits: processors without VNNI cut them.
    Why not is a line of the log. bfloat16 has no blocks: with AVX512 tiles are as fast or faster
    for any number of rows, and with AMX a row in blocks depends on how many are beside it.
    """
    if layout == "tiles" and not tiles.usable(dtype):
        return False
    if layout == "blocks" and dtype == torch.bfloat16:
        return False
    try:
        if right(LAYOUTS[layout], dtype):
            return True
        reason = "products are wrong"
    except (AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
    LOG.info("%s of %s are left out on this machine (%s)", layout, dtype, reason)
    return False


def right(lay: Callable[[Tensor], Tensor], dtype: torch.dtype) -> bool:
    """Whether products in a layout are what they have to be."""
    if dtype != torch.int8:
        rows, weight = torch.ones(2, 32, dtype=dtype), torch.eye(32, dtype=dtype)[:16]
        return torch.equal(bind_product(lay(weight))(rows), F.linear(rows, weight))
    rows = torch.tensor([[LEVELS, -LEVELS] * 64, [LEVELS] * 128, [-LEVELS] * 128])
    # Codes that were published go down to -128; ours do not.
    codes = [[LEVELS] * 128, [-LEVELS - 1] * 128, [LEVELS, -LEVELS] * 64, *[[1] * 128] * 13]
    weight = torch.tensor(codes, dtype=torch.int8)
    found = bind_product(lay(weight), None, torch.ones(len(weight)))(rows.float())
    return torch.equal(found, (rows @ weight.long().T).float())


def layouts(weight: Tensor) -> tuple[str, ...]:
    """Quick layouts that a matrix `[out, in]` can have, the usual one first; maybe none."""
    names = ("tiles", "blocks") if tiles.fits(weight) else ("blocks",)
    return tuple(name for name in names if has(name, weight.dtype))
