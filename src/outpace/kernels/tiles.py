"""Matrices in tiles, and compiled products with them (tiles.c).

A tile has 16 outputs of a matrix; for each unit of four bytes of a row it stores the 16 factors
together: `[outputs / 16, bytes of a row / 4, 16, 4 bytes]`. Sums of a row have a fixed order, so
its result does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.kernels.loader import PASS, THREAD_WORK, Isa, allocate_bytes, has_isa, load_library

TILE_OUTPUTS, UNIT_BYTES = 16, 4
"""Outputs of a tile, and bytes of a unit of a row."""


class TileLoop(NamedTuple):
    """A compiled loop: kind of numbers, as numbered in tiles.c, and instruction set."""

    kind: int
    isa: Isa


FLOAT32, BFLOAT16, INT8, WIDENED_BFLOAT16 = range(4)

TILE_LOOPS = {
    torch.float32: [TileLoop(FLOAT32, isa) for isa in (Isa.AVX512, Isa.AVX2, Isa.NEON)],
    torch.bfloat16: [
        TileLoop(BFLOAT16, Isa.AVX512_BF16),
        *(TileLoop(WIDENED_BFLOAT16, isa) for isa in (Isa.AVX512, Isa.AVX2, Isa.NEON)),
    ],
    torch.int8: [
        TileLoop(INT8, isa) for isa in (Isa.AVX512_VNNI, Isa.AVX_VNNI, Isa.AVX2, Isa.NEON)
    ],
}
"""Loops by the dtype of a matrix, fastest first; rows have the same dtype, or float32 for int8.
Widened bfloat16 is multiplied in float32."""

MAX_INT8_INPUTS = (2**31 - 1) // (128 * 127)
"""Inputs of an int8 matrix above which a sum may exceed 32 bits: codes of a matrix go down to -128,
codes of rows to -127."""

CODE_OFFSET = 128
"""Offset of int8 codes in a tile."""

TILED_LOOKUP_BYTES = 2**26
"""Bytes from which a tied embedding is looked up in the head's tiles, which is slower."""


@cache
def find_loop(dtype: torch.dtype) -> TileLoop | None:
    return next((loop for loop in TILE_LOOPS.get(dtype, ()) if has_isa(loop.isa)), None)


def has_tile_loop(dtype: torch.dtype) -> bool:
    return find_loop(dtype) is not None


def can_tile(weight: Tensor) -> bool:
    """Return whether a matrix `[out, in]` can be stored in tiles on this machine."""
    return tiling_error(weight) is None and has_tile_loop(weight.dtype)


def tiling_error(weight: Tensor) -> str | None:
    if weight.device.type != "cpu" or weight.dim() != 2 or weight.dtype not in TILE_LOOPS:
        kinds = ", ".join(str(dtype) for dtype in TILE_LOOPS)
        return f"must be a matrix [out, in] of {kinds} on a CPU, got {describe_tensor(weight)}"
    outputs, inputs = weight.shape
    if (
        outputs == 0
        or outputs % TILE_OUTPUTS
        or inputs == 0
        or inputs * weight.itemsize % UNIT_BYTES
    ):
        return (
            f"outputs must be a multiple of {TILE_OUTPUTS}, and inputs of "
            f"{UNIT_BYTES // weight.itemsize}, got {describe_tensor(weight)}"
        )
    if weight.dtype == torch.int8 and inputs > MAX_INT8_INPUTS:
        return f"int8 must have at most {MAX_INT8_INPUTS} inputs, got {inputs}"
    return None


def describe_tensor(tensor: Tensor) -> str:
    """Return shape, dtype and device of a tensor, for an error message."""
    return f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"


def to_tiles(weight: Tensor) -> Tensor:
    if reason := tiling_error(weight):
        raise ValueError(f"weight: {reason}")
    outputs, inputs = weight.shape
    each = UNIT_BYTES // weight.itemsize
    parts = weight.reshape(outputs // TILE_OUTPUTS, TILE_OUTPUTS, inputs // each, each).transpose(
        1, 2
    )
    tiles = allocate_bytes(weight.nbytes).view(weight.dtype).view(parts.shape).copy_(parts)
    return (
        tiles.view(torch.uint8).bitwise_xor_(CODE_OFFSET) if weight.dtype == torch.int8 else tiles
    )


def from_tiles(tiles: Tensor) -> Tensor:
    """Return the row-major matrix `[out, in]` of tiles."""
    return read_tile_rows(tiles, torch.arange(tiles.shape[0] * TILE_OUTPUTS))


def read_tile_rows(tiles: Tensor, numbers: Tensor) -> Tensor:
    """Return rows `[n, in]` of a matrix in tiles, by index `i64[n]`."""
    # Looking up units of four bytes is several times as fast as looking up single elements.
    units = tiles.view(torch.int32).squeeze(-1)[numbers // TILE_OUTPUTS, :, numbers % TILE_OUTPUTS]
    if tiles.dtype == torch.uint8:
        return units.view(torch.uint8).bitwise_xor_(CODE_OFFSET).view(torch.int8)
    return units.view(tiles.dtype)


RowProduct = Callable[[Tensor], Tensor]
"""Maps rows `[..., in]` to rows `[..., out]`."""


def bind_tile_product(
    tiles: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> RowProduct:
    """Return the product of rows with a matrix in tiles, plus a bias `f32[out]`.

    Tiles of int8 have a `scale f32[out]`, and rows of float32 are quantized to 8 bits with a scale
    per row. A row with an infinity or NaN becomes NaN. Raises `ValueError` for another shape, dtype
    or device, here or in the product: the compiled loop does not check its pointers.
    """
    eight = tiles.dtype is torch.uint8
    loop, loaded = find_loop(torch.int8 if eight else tiles.dtype), load_library()
    if (
        tiles.dim() != 4
        or not tiles.is_cpu
        or not tiles.is_contiguous()
        or (scale is not None) != eight
        or loop is None
        or loaded is None
    ):
        with_scale = "without" if scale is None else "with"
        raise ValueError(f"tiles: cannot multiply {describe_tensor(tiles)} {with_scale} scales")
    units, inputs, outputs = (
        tiles.shape[1],
        tiles.shape[1] * tiles.shape[3],
        TILE_OUTPUTS * len(tiles),
    )
    dtype = torch.float32 if eight else tiles.dtype
    bias = bias if bias is None else check_vector("bias", bias, outputs)
    scale = scale if scale is None else check_vector("scale", scale, outputs)
    work = inputs * outputs

    def multiply_rows(x: Tensor) -> Tensor:
        *leading, given = x.shape
        if given != inputs or x.dtype is not dtype or not x.is_cpu:
            raise ValueError(
                f"x: rows {describe_tensor(x)} do not fit tiles {describe_tensor(tiles)}"
            )
        x, out = x.contiguous(), torch.empty(*leading, outputs, dtype=dtype)
        count = x.numel() // inputs
        # Inlined from `loader.thread_count` to save a call per product and token.
        threads = min(PASS.count or torch.get_num_threads(), 1 + count * work // THREAD_WORK)
        if not loaded.outpace_multiply(
            *loop,
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

    return multiply_rows


def check_vector(name: str, part: Tensor, outputs: int) -> Tensor:
    """Return a contiguous bias or scale `f32[out]`; raise `ValueError` for anything else."""
    if part.dtype is not torch.float32 or part.shape != (outputs,) or not part.is_cpu:
        raise ValueError(f"{name} must be float32[{outputs}] on a CPU, got {describe_tensor(part)}")
    return part.contiguous()
