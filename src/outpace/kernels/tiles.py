"""Matrices in tiles, and compiled products with them, for x86 processors with AVX512 (tiles.c).

A tile has 16 outputs of a matrix; for each unit of four bytes of a row it stores the 16 factors
together: `[outputs / 16, bytes of a row / 4, 16, 4 bytes]`. Sums of a row have a fixed order, so
its result does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from outpace.kernels.loader import WORK, library

WIDTH, UNIT = 16, 4
"""Outputs of a tile, and bytes of a unit of a row."""

KINDS = {torch.float32: (0,), torch.bfloat16: (1, 3), torch.int8: (2,)}
"""Loops by the dtype of a matrix, fastest first; rows have the same dtype, or float32 for int8. The
second one of bfloat16 multiplies in float32, on processors without AVX512-BF16."""

LONGEST = (2**31 - 1) // (128 * 127)
"""Inputs of an int8 matrix above which a sum may exceed 32 bits: codes of a matrix go down to -128,
codes of rows to -127."""

SIGN = 128
"""Offset of int8 codes in a tile."""

LARGE = 2**26
"""Bytes from which a tied embedding is looked up in the head's tiles, which is slower."""


@cache
def loop(dtype: torch.dtype) -> int | None:
    """Return the loop for tiles of a dtype on this machine, if there is one."""
    if dtype not in KINDS or (loaded := library()) is None:
        return None
    return next((kind for kind in KINDS[dtype] if loaded.outpace_has_tiles(kind)), None)


def usable(dtype: torch.dtype) -> bool:
    """Return whether this machine has a loop for tiles of a dtype."""
    return loop(dtype) is not None


def fits(weight: Tensor) -> bool:
    """Return whether a matrix `[out, in]` can be stored in tiles on this machine."""
    return unfit(weight) is None and usable(weight.dtype)


def unfit(weight: Tensor) -> str | None:
    """Return why a matrix `[out, in]` cannot be stored in tiles; None if it can."""
    if weight.device.type != "cpu" or weight.dim() != 2 or weight.dtype not in KINDS:
        kinds = ", ".join(str(dtype) for dtype in KINDS)
        return f"must be a matrix [out, in] of {kinds} on a CPU, got {describe(weight)}"
    outputs, inputs = weight.shape
    if outputs == 0 or outputs % WIDTH or inputs == 0 or inputs * weight.itemsize % UNIT:
        return (
            f"outputs must be a multiple of {WIDTH}, and inputs of "
            f"{UNIT // weight.itemsize}, got {describe(weight)}"
        )
    if weight.dtype == torch.int8 and inputs > LONGEST:
        return f"int8 must have at most {LONGEST} inputs, got {inputs}"
    return None


def describe(tensor: Tensor) -> str:
    """Return shape, dtype and device of a tensor, for an error message."""
    return f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"


def laid(weight: Tensor) -> Tensor:
    """Return a copy of a matrix `[out, in]` in tiles.

    Raises:
        ValueError: For a matrix that cannot be stored in tiles.
    """
    if reason := unfit(weight):
        raise ValueError(f"weight: {reason}")
    outputs, inputs = weight.shape
    each = UNIT // weight.itemsize
    parts = weight.reshape(outputs // WIDTH, WIDTH, inputs // each, each).transpose(1, 2)
    tiles = parts.clone(memory_format=torch.contiguous_format)
    return tiles.view(torch.uint8).bitwise_xor_(SIGN) if weight.dtype == torch.int8 else tiles


def plain(tiles: Tensor) -> Tensor:
    """Return the row-major matrix `[out, in]` of tiles."""
    return rows(tiles, torch.arange(tiles.shape[0] * WIDTH))


def rows(tiles: Tensor, numbers: Tensor) -> Tensor:
    """Return rows `[n, in]` of a matrix in tiles, by index `i64[n]`."""
    # Looking up units of four bytes is several times as fast as looking up single elements.
    units = tiles.view(torch.int32).squeeze(-1)[numbers // WIDTH, :, numbers % WIDTH]
    if tiles.dtype == torch.uint8:
        return units.view(torch.uint8).bitwise_xor_(SIGN).view(torch.int8)
    return units.view(tiles.dtype)


Product = Callable[[Tensor], Tensor]
"""Maps rows `[..., in]` to rows `[..., out]`."""


def bind_product(tiles: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Product:
    """Return the product of rows with a matrix in tiles, plus a bias `f32[out]`.

    Tiles of int8 have a `scale f32[out]`, and rows of float32 are quantized to 8 bits with a scale
    per row. A row with an infinity or NaN becomes NaN. Raises `ValueError` for another shape, dtype
    or device, here or in the product: the compiled loop does not check its pointers.
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
        raise ValueError(f"tiles: cannot multiply {describe(tiles)} {with_scale} scales")
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
        # Inlined from `loader.thread_count` to save a call per product and token.
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
            raise MemoryError(f"not enough memory for a product of {count} rows")
        return out

    return product


def check_vector(name: str, part: Tensor, outputs: int) -> Tensor:
    """Return a contiguous bias or scale `f32[out]`; raise `ValueError` for anything else."""
    if part.dtype is not torch.float32 or part.shape != (outputs,) or not part.is_cpu:
        raise ValueError(f"{name} must be float32[{outputs}] on a CPU, got {describe(part)}")
    return part.contiguous()
