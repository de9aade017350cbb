"""Matrices in tiles, and compiled products with them, for x86 processors with AVX512 (tiles.c).

A tile has 16 outputs of a matrix, and of these one after the other what four bytes of a row are
multiplied by: `[outputs / 16, bytes of a row / 4, 16, 4 bytes]`. A row's numbers are added in the
same order whatever is beside it, so what becomes of it does not depend on its company.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from outpace.kernels.loader import WORK, library

WIDTH, UNIT = 16, 4
"""Outputs of a tile, and bytes of a row that meet them at a time."""

KINDS = {torch.float32: (0,), torch.bfloat16: (1, 3), torch.int8: (2,)}
"""Loops by the dtype of a matrix, the fastest first; rows have the same, or float32 where it has 8
bits. The second one of bfloat16 multiplies in float32, on processors without AVX512-BF16."""

LONGEST = (2**31 - 1) // (128 * 127)
"""Inputs of a matrix of 8 bits above which a sum may exceed 32 bits: codes of a matrix go down to
-128, those of rows to -127."""

SIGN = 128
"""By how much codes of 8 bits lie higher in a tile."""

LARGE = 2**26
"""Bytes of an embedding whose rows are looked up in the tiles of its head, which takes longer."""


@cache
def loop(dtype: torch.dtype) -> int | None:
    """The loop that multiplies tiles of a dtype on this machine, if there is one."""
    if dtype not in KINDS or (loaded := library()) is None:
        return None
    return next((kind for kind in KINDS[dtype] if loaded.outpace_has_tiles(kind)), None)


def usable(dtype: torch.dtype) -> bool:
    """Whether this machine multiplies tiles of a dtype."""
    return loop(dtype) is not None


def fits(weight: Tensor) -> bool:
    """Whether a matrix `[out, in]` can lie in tiles."""
    return unfit(weight) is None and usable(weight.dtype)


def unfit(weight: Tensor) -> str | None:
    """Why a matrix `[out, in]` cannot lie in tiles; None where it can."""
    if weight.device.type != "cpu" or weight.dim() != 2 or weight.dtype not in KINDS:
        kinds = ", ".join(str(dtype) for dtype in KINDS)
        return f"a matrix [out, in] of {kinds} on a CPU is needed, not {describe(weight)}"
    outputs, inputs = weight.shape
    if outputs == 0 or outputs % WIDTH or inputs == 0 or inputs * weight.itemsize % UNIT:
        return (
            f"outputs have to be a multiple of {WIDTH}, and inputs of {UNIT // weight.itemsize}, "
            f"not {describe(weight)}"
        )
    if weight.dtype == torch.int8 and inputs > LONGEST:
        return f"sums of 8 bits hold {LONGEST} inputs, not {inputs}"
    return None


def describe(tensor: Tensor) -> str:
    """Shape, dtype and device of a tensor, for an error message."""
    return f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"


def laid(weight: Tensor) -> Tensor:
    """A copy of a matrix `[out, in]` in tiles.

    Raises `ValueError` for a matrix that cannot lie in them.
    """
    if reason := unfit(weight):
        raise ValueError(f"weight: {reason}")
    outputs, inputs = weight.shape
    each = UNIT // weight.itemsize
    parts = weight.reshape(outputs // WIDTH, WIDTH, inputs // each, each).transpose(1, 2)
    tiles = parts.clone(memory_format=torch.contiguous_format)
    return tiles.view(torch.uint8).bitwise_xor_(SIGN) if weight.dtype == torch.int8 else tiles


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


Product = Callable[[Tensor], Tensor]
"""Maps rows `[..., in]` by a matrix to rows `[..., out]`."""


def bind_product(tiles: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Product:
    """The product with a matrix in tiles, plus a bias `f32[out]`; all but the rows is checked once.

    Tiles of 8 bits have a scale `f32[out]` for each output, and round rows of float32 to 8 bits
    with a scale of their own; a row with an infinity or NaN becomes NaN.
    Raises `ValueError` for another shape, dtype or device, here or for the rows: the loop reads
    what it is pointed to.
    """
    eight = tiles.dtype is torch.uint8
    kind, loaded = loop(torch.int8 if eight else tiles.dtype), library()
    if (
        tiles.dim() != 4
        or not tiles.is_cpu
        or not tiles.is_contiguous()
        or (scale is not None) != eight
        or kind is None
        or loaded is None
    ):
        with_scale = "without" if scale is None else "with"
        raise ValueError(f"tiles: {describe(tiles)} {with_scale} scales cannot be multiplied")
    units, inputs, outputs = tiles.shape[1], tiles.shape[1] * tiles.shape[3], WIDTH * len(tiles)
    dtype = torch.float32 if eight else tiles.dtype
    bias = bias if bias is None else check_vector("bias", bias, outputs)
    scale = scale if scale is None else check_vector("scale", scale, outputs)
    work = inputs * outputs

    def product(x: Tensor) -> Tensor:
        *leading, given = x.shape
        if given != inputs or x.dtype is not dtype or not x.is_cpu:
            raise ValueError(f"x: rows {describe(x)} do not fit tiles {describe(tiles)}")
        x, out = x.contiguous(), torch.empty(*leading, outputs, dtype=dtype)
        count = x.numel() // inputs
        # As `loader.threads`, whose call would be one more for each product of a token.
        threads = min(torch.get_num_threads(), 1 + count * work // WORK)
        if not loaded.outpace_multiply(
            kind,
            x.data_ptr(),
            count,
            units,
            tiles.data_ptr(),
            outputs,
            None if scale is None else scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            threads,
        ):
            raise MemoryError(f"no memory is left for a product of {count} rows")
        return out

    return product


def check_vector(name: str, part: Tensor, outputs: int) -> Tensor:
    """A contiguous bias or scale `f32[out]`; `ValueError` for anything else."""
    if part.dtype is not torch.float32 or part.shape != (outputs,) or not part.is_cpu:
        raise ValueError(f"{name}: [{outputs}] of float32 on a CPU is needed, not {describe(part)}")
    return part.contiguous()
