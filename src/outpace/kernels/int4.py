"""Blocks of 4 bits with a scale and a zero point, and of 8 bits, as `packed.py` packs them.

A block of `INT4` has 19 bytes: a float16 scale, a zero point from 0 to 15, and 32 codes of 4 bits;
byte j of the codes holds those of inputs j and j + 16. It represents `scale * (code - zero point)`.
A block of `Q8_0` has a float16 scale and 32 codes from -127 to 127 (GGUF).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from outpace.kernels.loader import load_library, thread_count
from outpace.kernels.packed import (
    BLOCK_FORMATS,
    PACKED_BLOCK,
    FormatRows,
    PackedMatrix,
    pack_matrix,
)

INT4_BYTES, Q8_0_BYTES = 19, 34
"""Bytes of a block."""

MAX_INT4_CODE, MAX_Q8_0_CODE = 15, 127

QUANTIZE_CHUNK = 2**20
"""Elements of a matrix in float32 at a time."""

TRIED_PAIRS = 18
"""Pairs of a scale and a zero point that are tried for a block."""


def build_int4_blocks(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return blocks `u8[out, blocks, 19]`.

    Args:
        codes: Codes from 0 to 15, `u8[out, 32 * blocks]`.
        scale: Scales `f16[out, blocks]`.
        zero: Zero points `u8[out, blocks]`.
    """
    out, count = scale.shape
    halves = codes.reshape(out, count, 2, PACKED_BLOCK // 2)
    blocks = torch.empty(out, count, INT4_BYTES, dtype=torch.uint8)
    blocks[..., :2] = scale.contiguous().unsqueeze(-1).view(torch.uint8)
    blocks[..., 2] = zero
    blocks[..., 3:] = halves[..., 1, :] << 4 | halves[..., 0, :]
    return blocks


def round_to_int4(rows: Tensor) -> Tensor:
    """Round rows `f32[out, in]` to blocks `u8[out, blocks, 19]`.

    Of 18 pairs of a scale and a zero point around those of a block's range, the pair with the least
    squared error is used (int4.c).
    """
    rows, loaded = rows.contiguous(), load_library()
    assert loaded is not None
    blocks = torch.empty(len(rows), rows.shape[1] // PACKED_BLOCK, INT4_BYTES, dtype=torch.uint8)
    work = thread_count(rows.numel() * TRIED_PAIRS)
    loaded.outpace_round_int4(
        rows.data_ptr(), rows.numel() // PACKED_BLOCK, blocks.data_ptr(), work
    )
    return blocks


def round_to_q8_0(rows: Tensor) -> Tensor:
    """Round rows `f32[out, in]` to blocks `u8[out, blocks, 34]`."""
    blocks = rows.reshape(len(rows), -1, PACKED_BLOCK)
    scale = (blocks.abs().amax(-1) / MAX_Q8_0_CODE).half()
    wide = scale.float()[..., None]
    step = torch.where(wide > 0, wide, torch.inf)
    codes = (blocks / step).round_().clamp_(-MAX_Q8_0_CODE, MAX_Q8_0_CODE).to(torch.int8)
    return torch.cat((scale[..., None].view(torch.uint8), codes.view(torch.uint8)), -1)


ROUND_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "INT4": round_to_int4,
    "Q8_0": round_to_q8_0,
}
"""Functions that round rows to a block format."""

BLOCK_BYTES = {"INT4": INT4_BYTES, "Q8_0": Q8_0_BYTES}
"""Bytes of a block, by format."""


def quantize_blocks(weight: Tensor, name: str) -> Tensor:
    """Round a matrix `[out, in]` to blocks `u8[out, blocks, bytes]` of a format, chunk by chunk.

    Inputs must be a multiple of 32.
    """
    out, inputs = weight.shape
    blocks = torch.empty(out, inputs // PACKED_BLOCK, BLOCK_BYTES[name], dtype=torch.uint8)
    step = max(QUANTIZE_CHUNK // inputs, 1)
    for first in range(0, out, step):
        rows = slice(first, first + step)
        blocks[rows] = ROUND_BLOCKS[name](weight[rows].float())
    return blocks


def pack_blocks(parts: list[Tensor], name: str, order: Tensor | None = None) -> PackedMatrix | None:
    """Pack blocks `u8[out, blocks, bytes]` of one format, stacked; None if a scale is not finite.

    Args:
        parts: Blocks of each part.
        name: Format, such as `INT4`.
        order: Number of the input at each place, `i64[in]`; None if in order.
    """
    assert all(part.is_contiguous() for part in parts)
    rows = [
        FormatRows(
            BLOCK_FORMATS[name],
            part.data_ptr() + np.arange(len(part), dtype=np.uint64) * np.uint64(part[0].numel()),
        )
        for part in parts
    ]
    return pack_matrix(rows, parts[0].shape[1] * PACKED_BLOCK, order)
