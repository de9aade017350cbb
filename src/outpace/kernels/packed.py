"""Matrices in blocks of 4 to 8 bits, packed into tiles without loss, and products with them.

The block formats are those of GGUF, and `INT4`: 32 codes of 4 bits with a float16 scale and a whole
zero point, which represent `scale * (code - zero point)`.

A tile has 16 outputs. For each block of 32 inputs it has their scales and minima, then their codes:
one register holds the codes of 16 outputs and four inputs (packed.c). Rows are quantized to 8 bits
with one scale per 32 numbers. Sums within a block are integers, and sums over blocks, in float32,
have a fixed order. A row's result therefore depends neither on the batch nor on the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.kernels.loader import Isa, allocate_bytes, has_isa, load_library, thread_count
from outpace.kernels.tiles import RowProduct, check_vector, describe_tensor

PACKED_BLOCK = 32
"""Numbers of a row that share a scale."""

BLOCK_FORMATS = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "INT4": 1004,
}
"""Block formats with a compiled loop. The numbers are GGUF's; that of `INT4` is not one of them."""

INPUT_MULTIPLES = {
    kind: 256 if name.endswith("_K") else PACKED_BLOCK for name, kind in BLOCK_FORMATS.items()
}
"""Multiple that the inputs of a matrix must have, by type number."""

FOUR_BITS = frozenset(BLOCK_FORMATS[name] for name in ("Q4_0", "Q4_1", "Q4_K", "INT4"))
"""Type numbers of the formats with codes of 4 bits."""

TILE_OUTPUTS = 16
"""Outputs of a tile."""

RUN_BYTES = {
    BLOCK_FORMATS[name]: (*head, *(*scales, *[4] * bits) * blocks)
    for name, head, scales, bits, blocks in (
        ("Q4_0", (2,), (), 4, 1),
        ("Q4_1", (2, 2), (), 4, 1),
        ("Q5_0", (2,), (), 5, 1),
        ("Q5_1", (2, 2), (), 5, 1),
        ("Q8_0", (2,), (), 8, 1),
        ("Q4_K", (2, 2), (1, 1), 4, 8),
        ("Q5_K", (2, 2), (1, 1), 5, 8),
        ("Q6_K", (2,), (1, 1), 6, 8),
        ("INT4", (2, 1), (), 4, 1),
    )
}
"""Bytes of an output in each run of a tile: scale and minimum, then the codes of blocks in words,
each after its integer scales (blocks.h)."""

RowAddresses = NDArray[np.uint64]
"""Memory addresses of a matrix's rows."""

PACKED_LOOPS = Isa.AVX512_VNNI, Isa.AVX_VNNI, Isa.AVX2, Isa.NEON
"""Instruction sets with loops, fastest first."""

PART_ALIGNMENT = 64
"""Alignment of a part in bytes: a register and a cache line."""


class PackedPart(Structure):
    """Outputs of a matrix in one format: the struct `part` of packed.c."""

    _fields_ = (("tiles", c_void_p), ("outputs", c_long), ("kind", c_long))


@dataclass(frozen=True)
class FormatRows:
    """Consecutive outputs of a matrix in one format, with the addresses of their bytes."""

    kind: int
    addresses: RowAddresses


@dataclass(frozen=True)
class PackedMatrix:
    """A packed matrix `[outputs, inputs]`."""

    tiles: Tensor
    """`u8[bytes]`, part after part."""
    inputs: int
    """Length of a row."""
    parts: tuple[tuple[int, int, int], ...]
    """Format, outputs and first byte of each part."""
    order: Tensor | None = None
    """Number of the input at each place, `i64[inputs]`, if the inputs were reordered."""

    @property
    def outputs(self) -> int:
        return sum(outputs for _, outputs, _ in self.parts)


def row_addresses(rows: NDArray[np.uint8]) -> RowAddresses:
    """Return the address of each of some rows `u8[rows, ...]`."""
    starts = np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.strides[0])
    return starts + np.uint64(rows.ctypes.data)


@cache
def find_packed_loop() -> Isa | None:
    """Return the instruction set of the fastest loop of this machine, if there is one."""
    return next(filter(has_isa, PACKED_LOOPS), None)


def pack_matrix(
    parts: Sequence[FormatRows], inputs: int, order: Tensor | None = None
) -> PackedMatrix | None:
    """Pack a matrix from rows of blocks; None if a scale is not finite.

    Args:
        parts: Outputs by format.
        inputs: Length of a row.
        order: Number of the input at each place of the rows `i64[inputs]`; None if in order.
    """
    loaded = load_library()
    if loaded is None or any(inputs % INPUT_MULTIPLES.get(part.kind, inputs + 1) for part in parts):
        kinds = ", ".join(str(part.kind) for part in parts)
        raise ValueError(f"parts: cannot pack {inputs} inputs in blocks of type {kinds}")
    bytes_of, count = loaded.outpace_packed_bytes, len(parts)
    sizes = [bytes_of(part.kind, len(part.addresses), inputs) for part in parts]
    *starts, size = accumulate(
        (-(-size // PART_ALIGNMENT) * PART_ALIGNMENT for size in sizes), initial=0
    )
    tiles = allocate_bytes(size)
    for part, start in zip(parts, starts, strict=True):
        rows, outputs = np.ascontiguousarray(part.addresses, np.uint64), len(part.addresses)
        place, work = tiles.data_ptr() + start, thread_count(outputs * inputs)
        if not loaded.outpace_pack(part.kind, rows.ctypes.data, outputs, inputs, place, work):
            return None
    entries = ((parts[n].kind, len(parts[n].addresses), starts[n]) for n in range(count))
    return PackedMatrix(tiles, inputs, tuple(entries), order)


def dequantize_packed(matrix: PackedMatrix) -> Tensor:
    counts = [outputs for _, outputs, _ in matrix.parts]
    return torch.cat([unpack_part(matrix, n, torch.arange(each)) for n, each in enumerate(counts)])


def unpack_rows(matrix: PackedMatrix, numbers: Tensor) -> Tensor:
    """Return dequantized rows `f32[..., in]` of a matrix with one part, by index `i64[...]`."""
    numbers = numbers.contiguous()
    if numbers.dtype is not torch.int64 or not numbers.is_cpu or len(matrix.parts) != 1:
        raise ValueError(f"numbers must be int64 on a CPU, got {describe_tensor(numbers)}")
    if numbers.numel():
        low, high = map(int, torch.aminmax(numbers))
        if low < 0 or high >= matrix.outputs:
            raise ValueError(f"numbers must be below {matrix.outputs}, got {low} to {high}")
    return unpack_part(matrix, 0, numbers)


def select_packed_rows(matrix: PackedMatrix, numbers: Tensor) -> PackedMatrix:
    """Return some rows of a matrix with one part, by index `i64[n]`, in the same format."""
    ((kind, outputs, _),) = matrix.parts
    runs, count = RUN_BYTES[kind], len(numbers)
    shape = matrix.inputs // INPUT_MULTIPLES[kind], TILE_OUTPUTS * sum(runs)
    tiles = allocate_bytes(-(-count // TILE_OUTPUTS) * shape[0] * shape[1]).zero_()
    size = -(-outputs // TILE_OUTPUTS) * shape[0] * shape[1]
    old, new = (each.numpy().reshape(-1, *shape) for each in (matrix.tiles[:size], tiles))
    source, target = (np.divmod(each, TILE_OUTPUTS) for each in (numbers.numpy(), np.arange(count)))
    end = 0
    for width in runs:
        begin, end = end, end + TILE_OUTPUTS * width
        words, own = (each[..., begin:end].view(f"u{width}") for each in (old, new))
        own[target[0], :, target[1]] = words[source[0], :, source[1]]
    return PackedMatrix(tiles, matrix.inputs, ((kind, count, 0),), matrix.order)


def unpack_part(matrix: PackedMatrix, part: int, numbers: Tensor) -> Tensor:
    loaded, out = load_library(), torch.empty(*numbers.shape, matrix.inputs)
    assert loaded is not None
    kind, _, start = matrix.parts[part]
    loaded.outpace_unpack(
        *(kind, matrix.tiles.data_ptr() + start, matrix.inputs, numbers.data_ptr()),
        *(numbers.numel(), out.data_ptr(), thread_count(out.numel())),
    )
    if matrix.order is None:
        return out
    return torch.empty_like(out).index_copy_(-1, matrix.order, out)


def bind_packed_product(
    matrix: PackedMatrix, bias: Tensor | None = None, loop: Isa | None = None
) -> RowProduct:
    """Return the product of rows with a packed matrix, plus a bias `f32[out]`.

    A row with an infinity or NaN becomes NaN. The memory of the matrix must not move while the
    product is used.
    """
    isa, loaded = find_packed_loop() if loop is None else loop, load_library()
    if loaded is None or isa not in PACKED_LOOPS or not has_isa(isa):
        names = ", ".join(each.name for each in PACKED_LOOPS if has_isa(each))
        raise ValueError(f"loop must be one of [{names}] on this processor, got {isa}")
    outputs = matrix.outputs
    bias = bias if bias is None else check_vector("bias", bias, outputs)
    start = matrix.tiles.data_ptr()
    entries = [PackedPart(start + offset, rows, form) for form, rows, offset in matrix.parts]
    table, call = (PackedPart * len(entries))(*entries), loaded.outpace_multiply_packed

    def multiply_rows(x: Tensor) -> Tensor:
        *leading, given = x.shape
        inputs = matrix.inputs  # this reference keeps the matrix's memory alive
        if given != inputs or x.dtype is not torch.float32 or not x.is_cpu:
            raise ValueError(f"x must be float32[..., {inputs}] on a CPU, got {describe_tensor(x)}")
        x = x.contiguous() if matrix.order is None else x.index_select(-1, matrix.order)
        out = torch.empty(*leading, outputs)
        count = x.numel() // inputs
        if not call(
            *(isa, table, len(table), x.data_ptr(), count, inputs, outputs),
            *(None if bias is None else bias.data_ptr(), out.data_ptr()),
            thread_count(count * inputs * outputs),
        ):
            raise MemoryError(f"not enough memory for a product of {count} rows")
        return out

    return multiply_rows


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
    """Round rows `f32[out, in]` to blocks `u8[out, blocks, 19]`."""
    # Of 18 pairs of a scale and a zero point around those of a block's range, the pair with the
    # least squared error is used (int4.c).
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


ROUND_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {"INT4": round_to_int4, "Q8_0": round_to_q8_0}
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
    """Pack stacked blocks `u8[out, blocks, bytes]` of a format; None if a scale is not finite."""
    assert all(part.is_contiguous() for part in parts)
    rows = [FormatRows(BLOCK_FORMATS[name], row_addresses(part.numpy())) for part in parts]
    return pack_matrix(rows, parts[0].shape[1] * PACKED_BLOCK, order)
