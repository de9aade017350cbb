"""Matrices in the block formats of GGUF, packed into tiles without loss, and products with them.

A tile has 16 outputs. For each block of 32 inputs it holds their scales and minima, then their
codes: one register serves 16 outputs and four inputs (packed.c). Rows are rounded to 8 bits with
one scale per 32 numbers. Sums of a block are whole numbers, and sums over blocks, in float32, have
one order. A row's result therefore depends neither on the rows beside it nor on the threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.kernels.loader import library, threads
from outpace.kernels.tiles import Product, check_vector, describe

BLOCK = 32
"""Numbers of a row that share a scale."""

KINDS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
"""Block formats that have a loop, and their numbers in GGUF."""

INPUTS = {kind: 256 if kind >= KINDS["Q4_K"] else BLOCK for kind in KINDS.values()}
"""What the inputs of a matrix are a multiple of."""

Addresses = NDArray[np.uint64]
"""Where the rows of a matrix begin in memory."""

ALIGNMENT = 64
"""Bytes that the beginning of a part is a multiple of: a register and a line of the cache."""


class Part(Structure):
    """Outputs of a matrix that have one format, as the loop reads them."""

    _fields_ = (("tiles", c_void_p), ("outputs", c_long), ("kind", c_long))


@dataclass(frozen=True)
class Rows:
    """Outputs of a matrix that follow each other in one format, and where their bytes are."""

    kind: int
    addresses: Addresses


@dataclass(frozen=True)
class Packed:
    """A matrix `[outputs, inputs]`.

    Attributes:
        tiles: `u8[bytes]`, one part after the other.
        inputs: numbers of a row.
        parts: format, outputs and first byte of each part.
    """

    tiles: Tensor
    inputs: int
    parts: tuple[tuple[int, int, int], ...]

    @property
    def outputs(self) -> int:
        """Rows of all parts."""
        return sum(outputs for _, outputs, _ in self.parts)


@cache
def level() -> int:
    """The best loop of this machine: 2 with AVX512-VNNI, 1 with AVX2, 0 for none."""
    loaded = library()
    return 0 if loaded is None else int(loaded.outpace_packed_level())


def pack_rows(parts: Sequence[Rows], inputs: int) -> Packed | None:
    """Pack a matrix whose rows have the bytes of a GGUF file; None where a scale is not finite.

    Raises `ValueError` for inputs that are no multiple of a block.
    """
    loaded = library()
    if loaded is None or any(inputs % INPUTS.get(part.kind, inputs + 1) for part in parts):
        kinds = ", ".join(str(part.kind) for part in parts)
        raise ValueError(f"parts: {inputs} inputs in blocks of type {kinds} cannot be packed")
    bytes_of, count = loaded.outpace_packed_bytes, len(parts)
    sizes = [bytes_of(part.kind, len(part.addresses), inputs) for part in parts]
    *starts, size = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
    tiles = torch.empty(size, dtype=torch.uint8)
    for part, start in zip(parts, starts, strict=True):
        rows, outputs = np.ascontiguousarray(part.addresses, np.uint64), len(part.addresses)
        place, work = tiles.data_ptr() + start, threads(outputs * inputs)
        if not loaded.outpace_pack(part.kind, rows.ctypes.data, outputs, inputs, place, work):
            return None
    held = ((parts[n].kind, len(parts[n].addresses), starts[n]) for n in range(count))
    return Packed(tiles, inputs, tuple(held))


def dequantize(matrix: Packed) -> Tensor:
    """The matrix `f32[out, in]`."""
    return torch.cat(
        [
            unpack(matrix, part, torch.arange(outputs))
            for part, (_, outputs, _) in enumerate(matrix.parts)
        ]
    )


def unpack_rows(matrix: Packed, numbers: Tensor) -> Tensor:
    """Dequantized rows `f32[..., in]` of a matrix of one part, by their numbers `i64[...]`.

    Raises `ValueError` for numbers of rows that it does not have.
    """
    numbers = numbers.contiguous()
    if numbers.dtype is not torch.int64 or not numbers.is_cpu or len(matrix.parts) != 1:
        raise ValueError(f"numbers: int64 on a CPU is needed, not {describe(numbers)}")
    if numbers.numel():
        low, high = map(int, torch.aminmax(numbers))
        if low < 0 or high >= matrix.outputs:
            raise ValueError(f"numbers: rows {low} to {high} of a matrix of {matrix.outputs}")
    return unpack(matrix, 0, numbers)


def unpack(matrix: Packed, part: int, numbers: Tensor) -> Tensor:
    """Rows of a part, by numbers that it has."""
    loaded, out = library(), torch.empty(*numbers.shape, matrix.inputs)
    assert loaded is not None
    kind, _, start = matrix.parts[part]
    loaded.outpace_unpack(
        *(kind, matrix.tiles.data_ptr() + start, matrix.inputs, numbers.data_ptr()),
        *(numbers.numel(), out.data_ptr(), threads(out.numel())),
    )
    return out


def bind_product(matrix: Packed, bias: Tensor | None = None, loop: int | None = None) -> Product:
    """The product with a matrix, plus a bias `f32[out]`.

    A row with an infinity or NaN becomes NaN. The memory of the matrix must not move while the
    product is used. `loop` is that of `level()` unless given.

    Raises `ValueError` for another bias, for other rows, and where the processor has no loop.
    """
    kind, loaded = level() if loop is None else loop, library()
    if loaded is None or not 0 < kind <= level():
        raise ValueError(f"loop {kind} needs another processor; this one has {level()}")
    outputs = matrix.outputs
    bias = bias if bias is None else check_vector("bias", bias, outputs)
    start = matrix.tiles.data_ptr()
    entries = [Part(start + offset, rows, form) for form, rows, offset in matrix.parts]
    table, call = (Part * len(entries))(*entries), loaded.outpace_multiply_packed

    def product(x: Tensor) -> Tensor:
        *leading, given = x.shape
        inputs = matrix.inputs  # which keeps the memory that the loop reads
        if given != inputs or x.dtype is not torch.float32 or not x.is_cpu:
            raise ValueError(f"x: {inputs} inputs of float32 on a CPU needed, not {describe(x)}")
        x, out = x.contiguous(), torch.empty(*leading, outputs)
        count = x.numel() // inputs
        if not call(
            *(kind, table, len(table), x.data_ptr(), count, inputs, outputs),
            *(None if bias is None else bias.data_ptr(), out.data_ptr()),
            threads(count * inputs * outputs),
        ):
            raise MemoryError(f"no memory is left for a product of {count} rows")
        return out

    return product
