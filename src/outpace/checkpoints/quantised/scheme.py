"""What turns the stored tensors of a quantised checkpoint into plain matrices.

Shapes: a matrix is `[out, in]`; its inputs fall into G groups, each with a scale (and a zero point,
the code that stands for nought) for every output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.checkpoints.fields import LARGE
from outpace.decoding.sampling_params import is_whole

FLOATS = ("BF16", "F16", "F32", "F64")
"""Types of tensors that are plain, and of scales, as safetensors calls them."""

PIECE = 2**22
"""Elements of a matrix that are worked on at a time."""


class Source(Protocol):
    """The tensors of a checkpoint as they are stored, by name."""

    def __contains__(self, name: str) -> bool: ...

    def path(self, name: str) -> Path:
        """File that has a tensor; `ValueError` if there is none."""
        ...

    def kind(self, name: str) -> str:
        """Type of a tensor's numbers, such as `BF16`."""
        ...

    def stored(
        self, name: str, shapes: Collection[tuple[int, ...]], kinds: Collection[str]
    ) -> Tensor:
        """A tensor; `ValueError` where it has none of these shapes and types."""
        ...


class Scheme(ABC):
    """How a checkpoint stores its matrices, as its `quantization_config` says."""

    about: str
    """What loads, for the text of errors."""

    @abstractmethod
    def parts(self, source: Source, name: str) -> tuple[str, ...]:
        """Stored tensors that make a published matrix; none where it is stored as it is."""

    @abstractmethod
    def plain(self, source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
        """A matrix `f32[out, in]` of stored parts; `ValueError` naming the part that is wrong."""

    def codes(
        self, source: Source, name: str, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor] | None:
        """Codes `i8[out, in]` and scales `f32[out]` of a matrix that is stored as such, or None."""
        return None

    def rounds_rows(self, name: str) -> bool:
        """Whether rows that meet this matrix are rounded to 8 bits, each by a scale of its own."""
        return False

    def idle(self, source: Source, name: str) -> bool:
        """Whether a stored tensor that no matrix has changes nothing.

        Some writers give every matrix a bias, of zeros where the model has none.
        """
        if not name.endswith(".bias"):
            return False
        matrix = f"{name.removesuffix('.bias')}.weight"
        return bool(self.parts(source, matrix)) and zeros(source, name)


def zeros(source: Source, name: str) -> bool:
    """Whether a stored tensor has nothing but zeros."""
    return not bool(source.stored(name, (), ()).any())


def scales(source: Source, name: str, *shapes: tuple[int, ...]) -> Tensor:
    """Scales in float32; `ValueError` for any that are none.

    A group of weights too small for the type of its scale has the scale zero.
    """
    found = source.stored(name, shapes, (*FLOATS, "F8_E8M0")).float()
    low, high = (float(value) for value in torch.aminmax(found)) if found.numel() else (0.0, 0.0)
    if not (low >= 0 and 0 < high < float("inf")):
        raise ValueError(
            f"{source.path(name)}: the scales {name!r} go from {low:g} to {high:g}, but must be "
            "finite, not negative and not all zero"
        )
    return found


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes `u8[..., n * 32 / bits]` of words `i32[..., n]`, lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def scaled(codes: Tensor, scale: Tensor, zero: Tensor | None, group: Tensor | None) -> Tensor:
    """`f32[out, in]` of codes, by the scale and zero `[out, G]` of each input's `group i64[in]`.

    Without groups every output has one of each.
    """
    plain = codes.float()
    some = max(PIECE // plain.shape[1], 1)
    for first in range(0, len(plain), some):
        rows = slice(first, first + some)
        if zero is not None:
            plain[rows] -= spread(zero[rows].float(), group)
        plain[rows] *= spread(scale[rows], group)
    return plain


def spread(values: Tensor, group: Tensor | None) -> Tensor:
    """Values `[rows, G]` for each input."""
    return values if group is None else values[:, group]


def blocks(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """`f32[out, in]` of codes, by a scale `[ceil(out / a), ceil(in / b)]` for each block a × b."""
    plain, (high, wide) = codes.float(), block
    for number, row in enumerate(scale):
        rows = slice(number * high, (number + 1) * high)
        plain[rows] *= row.repeat_interleave(wide)[: plain.shape[1]]
    return plain


def groups(shape: tuple[int, ...], size: int) -> tuple[int, Tensor | None]:
    """How many groups of so many inputs a matrix has, and that of each input; -1 is one for all."""
    if size == -1 or size >= shape[1]:
        return 1, None
    return -(-shape[1] // size), torch.arange(shape[1]) // size


def order(source: Source, name: str, shape: tuple[int, ...], count: int) -> Tensor:
    """Stored numbers of each input's group; `ValueError` for one that there is not."""
    found = source.stored(name, ((shape[1],),), ("I32", "I64")).long()
    if bool((found < 0).any() | (found >= count).any()):
        raise ValueError(f"{source.path(name)}: {name!r} names groups beyond the {count} there are")
    return found


def is_matrix(name: str) -> bool:
    """Whether a published tensor may be a matrix."""
    return name.endswith(".weight")


def group_size(value: Any) -> int:
    """Inputs of a group."""
    if is_whole(value) and (value == -1 or 0 < value <= LARGE):
        return int(value)
    raise ValueError("a number of inputs, or -1 for all")


def bits(value: Any) -> int:
    """Bits of a code."""
    if is_whole(value) and value in (4, 8):
        return int(value)
    raise ValueError("4 or 8")
