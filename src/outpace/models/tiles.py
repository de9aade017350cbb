"""Matrices in tiles, and compiled products with them, for x86 processors with AVX512 (tiles.c).

A tile has 16 outputs of a matrix, and of these one after the other what four bytes of a row are
multiplied by: `[outputs / 16, bytes of a row / 4, 16, 4 bytes]`. A row's numbers are added in the
same order whatever is beside it, so what becomes of it does not depend on its company.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from outpace.models.compiled import library, threads

WIDTH, UNIT, DEPTH = 16, 4, 128
"""Outputs of a tile, bytes of a row that meet them at a time, rows that are laid out together."""

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""Numbers of a matrix; rows have the same, or float32 where it has 8 bits."""

SIGN = 128
"""By how much codes of 8 bits lie higher in a tile."""

LARGE = 2**26
"""Bytes of an embedding whose rows are looked up in the tiles of its head, which takes longer."""


@cache
def usable(dtype: torch.dtype) -> bool:
    """Whether this machine multiplies tiles of a dtype."""
    if dtype not in KINDS or (loaded := library()) is None:
        return False
    return bool(loaded.outpace_has_tiles(KINDS[dtype]))


def fits(weight: Tensor) -> bool:
    """Whether a matrix `[out, in]` can lie in tiles."""
    outputs, inputs = weight.shape
    whole = outputs % WIDTH == 0 and inputs * weight.itemsize % UNIT == 0
    return whole and outputs > 0 and inputs > 0 and usable(weight.dtype)


def laid(weight: Tensor) -> Tensor:
    """A matrix `[out, in]` in tiles."""
    outputs, inputs = weight.shape
    each = UNIT // weight.itemsize
    parts = weight.reshape(outputs // WIDTH, WIDTH, inputs // each, each).transpose(1, 2)
    if weight.dtype == torch.int8:
        return parts.contiguous().view(torch.uint8).bitwise_xor_(SIGN)
    return parts.contiguous()


def plain(tiles: Tensor) -> Tensor:
    """The matrix `[out, in]` that lies in tiles."""
    return rows(tiles, torch.arange(tiles.shape[0] * WIDTH))


def rows(tiles: Tensor, numbers: Tensor) -> Tensor:
    """Some of its rows `[n, in]`, by their numbers `i64[n]`."""
    # As units, which are looked up several times as fast as what they consist of.
    units = tiles.view(torch.int32).squeeze(-1)[numbers // WIDTH, :, numbers % WIDTH]
    if tiles.dtype == torch.uint8:
        return units.view(torch.uint8).bitwise_xor_(SIGN).view(torch.int8)
    return units.view(tiles.dtype)


def product(
    x: Tensor, tiles: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Rows `[..., out]` of what becomes of rows `x [..., in]`, plus a bias `f32[out]`.

    Tiles of 8 bits have a scale `f32[out]` for each output, and round rows of float32 to 8 bits
    with a scale of their own.
    """
    kind = tiles.dtype if scale is None else torch.int8
    x, outputs, units = x.contiguous(), tiles.shape[0] * WIDTH, tiles.shape[1]
    *leading, inputs = x.shape
    loaded, count = library(), x.numel() // inputs
    assert loaded is not None and x.dtype == (kind if scale is None else torch.float32)
    assert inputs * kind.itemsize == units * UNIT
    out = torch.empty(*leading, outputs, dtype=x.dtype)
    scratch = torch.empty(2 * count + min(count, DEPTH) * units, dtype=torch.int32)
    loaded.outpace_product(
        *(KINDS[kind], x.data_ptr(), count, units),
        *(tiles.data_ptr(), outputs, None if scale is None else scale.data_ptr()),
        *(None if bias is None else bias.data_ptr(), out.data_ptr(), scratch.data_ptr()),
        threads(count * inputs * outputs),
    )
    return out
