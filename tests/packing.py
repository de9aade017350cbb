"""Matrices in the block formats of GGUF and in INT4, and their products by a loop in NumPy."""

from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

from outpace.kernels.packed import (
    BLOCK_FORMATS,
    INPUT_MULTIPLES,
    PACKED_BLOCK,
    FormatRows,
    PackedMatrix,
    pack_matrix,
)

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

MINIMA = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
"""Formats that have a minimum."""

SUB_SCALES = {"Q4_K": slice(4, 16), "Q5_K": slice(4, 16), "Q6_K": slice(192, 208)}
"""Where a block of 256 has the scales of its parts."""


INT4_SIZES = (32, 19)
"""Numbers of a block of INT4, and its bytes."""


def places(name: str) -> list[int]:
    """Return the places of float16 numbers in the bytes of a block."""
    return [208] if name == "Q6_K" else [0, 2] if name in MINIMA else [0]


def random_blocks(name: str, outputs: int, inputs: int, seed: int = 0) -> Bytes:
    """Return bytes `[out, blocks, size]` of a matrix: any codes, and scales of a usual size."""
    rng = np.random.default_rng(seed)
    numbers, size = INT4_SIZES if name == "INT4" else GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (outputs, inputs // numbers, size), np.uint8)
    for place in places(name):
        scales = rng.normal(0, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    if name == "INT4":
        blocks[..., 2] %= 17
    return blocks


def rows_of(name: str, blocks: Bytes) -> FormatRows:
    return FormatRows(BLOCK_FORMATS[name], np.array([row.ctypes.data for row in blocks], np.uint64))


def pack_blocks(name: str, blocks: Bytes) -> PackedMatrix:
    packed = pack_matrix(
        [rows_of(name, blocks)], blocks.shape[1] * INPUT_MULTIPLES[BLOCK_FORMATS[name]]
    )
    assert packed is not None
    return packed


def dequantized(name: str, blocks: Bytes) -> Floats:
    """Return the matrix `[out, in]` as the library `gguf` reads it, or as INT4 is defined."""
    if name == "INT4":
        scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
        codes = np.concatenate((blocks[..., 3:] & 15, blocks[..., 3:] >> 4), -1)
        own = scale * (codes.astype(np.float32) - blocks[..., 2:3].astype(np.float32))
        return np.ascontiguousarray(own.reshape(len(blocks), -1), np.float32)
    numbers: Floats = quants.dequantize(blocks.reshape(len(blocks), -1), GGMLQuantizationType[name])
    return numbers


def parts_of(name: str, blocks: Bytes) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Return codes `[out, in]`, scales and minima `[out, in / 16]` of a matrix."""
    plain = blocks.copy()
    for number, place in enumerate(places(name)):
        one = np.array([0 if number else 1], np.float16).view(np.uint8)
        plain[..., place : place + 2] = one
    first, *more = (blocks[..., at : at + 2].copy().view(np.float16) for at in places(name))
    scale = first.astype(np.float32)
    minimum = more[0].astype(np.float32) if more else np.zeros_like(scale)
    if name == "Q6_K":
        plain[..., SUB_SCALES[name]] = 1
        scale = scale * blocks[..., SUB_SCALES[name]].view(np.int8)
        minimum = np.zeros_like(scale)
    elif name in SUB_SCALES:
        # A scale of 1 and a minimum of 0 in each eighth.
        plain[..., SUB_SCALES[name]] = [*[1] * 4, *[0] * 4, *[1] * 4]
        own = blocks[..., SUB_SCALES[name]].reshape(-1, 12)
        scales, minima = quants.Q4_K.get_scale_min(own)
        scale = scale * scales.reshape(*blocks.shape[:2], 8)
        minimum = -(minimum * minima.reshape(*blocks.shape[:2], 8))
    codes = dequantized(name, plain).astype(np.int64)
    sixteenths = codes.shape[1] // 16
    wide = [
        np.repeat(each.reshape(len(codes), -1), sixteenths // (each.size // len(codes)), axis=1)
        for each in (scale.astype(np.float32), minimum.astype(np.float32))
    ]
    return codes, wide[0], wide[1]


def rounded(x: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Return codes `[T, blocks, 32]` of rows, and the scale `[T, blocks]` of each block."""
    blocks = x.reshape(len(x), -1, PACKED_BLOCK)
    scale = np.maximum(np.abs(blocks).max(-1), np.float32(1e-30)) / np.float32(127)
    return np.rint(blocks / scale[..., None]).astype(np.int64), scale


def fused(a: Any, b: Any, c: Floats) -> Floats:
    wide = np.multiply(a, b, dtype=np.longdouble) + c.astype(np.longdouble)
    sums: Floats = wide.astype(np.float32)
    return sums


def multiplied(name: str, blocks: Bytes, x: Floats) -> Floats:
    """Return rows `[T, out]`, summed in integers in a block, then in float32 over the blocks."""
    codes, scale, minimum = parts_of(name, blocks)
    own, step = rounded(x)
    total = np.zeros((len(x), len(codes)), np.float32)
    width = 16 if name == "Q6_K" else PACKED_BLOCK
    for first in range(0, codes.shape[1], width):
        block, part = divmod(first, PACKED_BLOCK)
        some = own[:, block, part : part + width]
        whole = (some @ codes[:, first : first + width].T).astype(np.float32)
        total = fused(whole, scale[:, first // 16] * step[:, block, None], total)
        if name in MINIMA:
            sums = step[:, block] * some.sum(-1).astype(np.float32)
            total = fused(minimum[:, first // 16], sums[:, None], total)
    return total
