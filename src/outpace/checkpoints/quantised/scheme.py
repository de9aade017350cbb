"""Quantization schemes: how stored tensors become dequantized matrices.

Shapes: a matrix is `[out, in]`. Its inputs are divided into G groups, each with a scale and
optionally a zero point (the code of zero) per output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.checkpoints.fields import MAX_PUBLISHED_SIZE
from outpace.field_types import is_whole_number
from outpace.kernels.packed import (
    MAX_INT4_CODE,
    PACKED_BLOCK,
    PackedMatrix,
    build_int4_blocks,
    pack_blocks,
)

FLOAT_TYPES = ("BF16", "F16", "F32", "F64")
"""Types of unquantized tensors and of scales, by their safetensors names."""

CHUNK_ELEMENTS = 2**22
"""Elements of a matrix that are scaled at a time, to limit memory."""


class TensorSource(Protocol):
    """The stored tensors of a checkpoint, by name."""

    def __contains__(self, name: str) -> bool: ...

    def tensor_path(self, name: str) -> Path:
        """Return the file of a tensor; raise `ValueError` if there is none."""
        ...

    def stored_type(self, name: str) -> str:
        """Return the type of a tensor's elements, such as `BF16`."""
        ...

    def read_stored(
        self, name: str, shapes: Collection[tuple[int, ...]], kinds: Collection[str]
    ) -> Tensor:
        """Read a tensor; raise `ValueError` unless it has one of these shapes and types."""
        ...


@dataclass(frozen=True)
class GroupedCodes:
    """A matrix of integers with a scale and a zero point per output and group of inputs.

    Attributes:
        codes: Codes `[out, in]`.
        scale: Scales `f32[out, G]`.
        zero: Zero points `[out, G]`; None if they are zero.
        group: Group of each input, `i64[in]`; None for a single group.
        lowest: Lowest code of its number of bits: 0, or negative if codes are signed.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    group: Tensor | None
    lowest: int = 0

    def dequantize(self) -> Tensor:
        """Return the matrix `f32[out, in]`."""
        return scale_codes(self.codes, self.scale, self.zero, self.group)


class Scheme(ABC):
    """How a checkpoint stores its matrices, according to its `quantization_config`."""

    about: str
    """Supported format, for error messages."""

    @abstractmethod
    def part_names(self, source: TensorSource, name: str) -> tuple[str, ...]:
        """Return the stored tensors of a published matrix; empty if it is not quantized."""

    @abstractmethod
    def read_matrix(self, source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a dequantized matrix `f32[out, in]`; raise `ValueError` naming an invalid part."""

    def read_codes(
        self, source: TensorSource, name: str, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor] | None:
        """Read a matrix stored as codes `i8[out, in]` and scales `f32[out]`, or return None."""
        return None

    @property
    def has_int4(self) -> bool:
        """Whether matrices may be stored as groups of 4-bit codes."""
        return False

    def read_int4(
        self, source: TensorSource, name: str, shape: tuple[int, ...]
    ) -> GroupedCodes | None:
        """Read a matrix stored as groups of 4-bit codes, or return None."""
        return None

    def rounds_rows(self, name: str) -> bool:
        """Return whether activations for this matrix are quantized to 8 bits per row."""
        return False

    def is_unused(self, source: TensorSource, name: str) -> bool:
        """Return whether a stored tensor that no parameter uses has no effect.

        Some writers give every matrix a bias, with zeros if the model has none.
        """
        if not name.endswith(".bias"):
            return False
        matrix = f"{name.removesuffix('.bias')}.weight"
        return bool(self.part_names(source, matrix)) and is_all_zero(source, name)


class GroupedScheme(Scheme):
    """Codes of all matrices in words, with a scale and a zero point per group of inputs."""

    bits: int

    @abstractmethod
    def read_groups(self, source: TensorSource, name: str, shape: tuple[int, ...]) -> GroupedCodes:
        """Read codes, scales and zero points; raise `ValueError` naming an invalid part."""

    def part_names(self, source: TensorSource, name: str) -> tuple[str, ...]:
        stem = name.removesuffix("weight")
        if not is_matrix(name) or f"{stem}qweight" not in source:
            return ()
        return f"{stem}qweight", f"{stem}qzeros", f"{stem}scales"

    def read_matrix(self, source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.read_groups(source, name, shape).dequantize()

    @property
    def has_int4(self) -> bool:
        return self.bits == 4

    def read_int4(
        self, source: TensorSource, name: str, shape: tuple[int, ...]
    ) -> GroupedCodes | None:
        if not self.has_int4 or not self.part_names(source, name):
            return None
        return self.read_groups(source, name, shape)


def is_all_zero(source: TensorSource, name: str) -> bool:
    """Return whether a stored tensor has only zeros."""
    return not bool(source.read_stored(name, (), ()).any())


def read_scales(source: TensorSource, name: str, *shapes: tuple[int, ...]) -> Tensor:
    """Read scales in float32; raise `ValueError` for invalid ones.

    A scale may be zero, for a group of weights too small for the scale's type.
    """
    found = source.read_stored(name, shapes, (*FLOAT_TYPES, "F8_E8M0")).float()
    low, high = (float(value) for value in torch.aminmax(found)) if found.numel() else (0.0, 0.0)
    if not (low >= 0 and 0 < high < float("inf")):
        raise ValueError(
            f"{source.tensor_path(name)}: scales {name!r} must be finite, not "
            "negative and not all zero, "
            f"got {low:g} to {high:g}"
        )
    return found


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """Unpack words `i32[..., n]` to codes `u8[..., n * 32 / bits]`, lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def scale_codes(codes: Tensor, scale: Tensor, zero: Tensor | None, group: Tensor | None) -> Tensor:
    """Return (codes - zero) * scale, `f32[out, in]`.

    Args:
        codes: Codes `[out, in]`.
        scale: Scales `[out, G]`.
        zero: Zero points `[out, G]`, if any.
        group: Group of each input, `i64[in]`; None for a single group.
    """
    plain = codes.float()
    step = max(CHUNK_ELEMENTS // plain.shape[1], 1)
    for first in range(0, len(plain), step):
        rows = slice(first, first + step)
        if zero is not None:
            plain[rows] -= expand_by_group(zero[rows].float(), group)
        plain[rows] *= expand_by_group(scale[rows], group)
    return plain


def expand_by_group(values: Tensor, group: Tensor | None) -> Tensor:
    """Expand values `[rows, G]` to `[rows, in]`; unchanged for a single group."""
    return values if group is None else values[:, group]


def scale_blocks(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Scale codes to `f32[out, in]` by `[ceil(out / a), ceil(in / b)]`, one per a × b block."""
    plain, (high, wide) = codes.float(), block
    for number, row in enumerate(scale):
        rows = slice(number * high, (number + 1) * high)
        plain[rows] *= row.repeat_interleave(wide)[: plain.shape[1]]
    return plain


def group_inputs(shape: tuple[int, ...], size: int) -> tuple[int, Tensor | None]:
    """Return the number of groups of `size` inputs (-1: all inputs), and each input's group."""
    if size == -1 or size >= shape[1]:
        return 1, None
    return -(-shape[1] // size), torch.arange(shape[1]) // size


def read_group_indices(
    source: TensorSource, name: str, shape: tuple[int, ...], count: int
) -> Tensor:
    """Read the stored group of each input; raise `ValueError` for one out of range."""
    found = source.read_stored(name, ((shape[1],),), ("I32", "I64")).long()
    if bool((found < 0).any() | (found >= count).any()):
        raise ValueError(f"{source.tensor_path(name)}: groups in {name!r} must be below {count}")
    return found


def is_matrix(name: str) -> bool:
    """Return whether a published tensor may be a matrix."""
    return name.endswith(".weight")


def parse_group_size(value: Any) -> int:
    """Parse the number of inputs of a group."""
    if is_whole_number(value) and (value == -1 or 0 < value <= MAX_PUBLISHED_SIZE):
        return int(value)
    raise ValueError("a number of inputs, or -1 for all")


def parse_bits(value: Any) -> int:
    if is_whole_number(value) and value in (4, 8):
        return int(value)
    raise ValueError("4 or 8")


class PackingError(Exception):
    """Groups that cannot be packed without loss; the message is the reason."""


def pack_groups(parts: Sequence[GroupedCodes]) -> PackedMatrix:
    """Pack a matrix from the groups of its parts, stacked.

    Inputs in an order other than that of their groups are reordered.

    Raises:
        PackingError: If the packed matrix would differ from the dequantized one.
    """
    orders = [order_by_group(part.group) for part in parts]
    first = orders[0]
    if not all(
        order is first or (order is not None and first is not None and torch.equal(order, first))
        for order in orders
    ):
        raise PackingError("matrices that are stacked here order their inputs differently")
    packed = pack_blocks([convert_groups(part, first) for part in parts], "INT4", first)
    assert packed is not None  # scales are finite
    return packed


def order_by_group(group: Tensor | None) -> Tensor | None:
    """Return the inputs ordered by group, `i64[in]`; None if they are in order."""
    if group is None or bool((group.diff() >= 0).all()):
        return None
    return group.argsort(stable=True)


def convert_groups(part: GroupedCodes, order: Tensor | None) -> Tensor:
    """Convert groups to blocks `u8[out, blocks, 19]`, with the inputs in this order."""
    inputs = part.codes.shape[1]
    if inputs % PACKED_BLOCK:
        raise PackingError(f"{inputs} inputs are not a multiple of {PACKED_BLOCK}")
    codes = part.codes if order is None else part.codes[:, order]
    zero = torch.zeros_like(part.scale) if part.zero is None else part.zero
    scale = part.scale.half()
    if not torch.equal(scale.float(), part.scale):
        raise PackingError("scales are not exact in float16")
    for numbers in (codes, zero):
        low, high = (int(number) - part.lowest for number in numbers.aminmax())
        if low < 0 or high > MAX_INT4_CODE:
            raise PackingError("codes or zero points have more than 4 bits")
    codes, zero = ((numbers - part.lowest).to(torch.uint8) for numbers in (codes, zero))
    blocks = inputs // PACKED_BLOCK
    if part.group is None:
        return build_int4_blocks(codes, scale.expand(-1, blocks), zero.expand(-1, blocks))
    group = (part.group if order is None else part.group[order]).view(blocks, PACKED_BLOCK)
    if not torch.equal(group, group[:, :1].expand_as(group)):
        raise PackingError(f"a group does not end after a multiple of {PACKED_BLOCK} inputs")
    return build_int4_blocks(codes, scale[:, group[:, 0]], zero[:, group[:, 0]])
