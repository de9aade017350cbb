"""How compressed-tensors stores the matrices of a group of modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.checkpoints.quantised.fp8 import FP8_TYPE
from outpace.checkpoints.quantised.scheme import (
    GroupedCodes,
    TensorSource,
    group_inputs,
    read_group_indices,
    read_scales,
    unpack_codes,
)


@dataclass(frozen=True)
class GroupScheme:
    """How the matrices of a group of modules are stored."""

    targets: tuple[str, ...]
    packed: bool
    bits: int
    kind: str
    symmetric: bool
    strategy: str
    size: int
    block: tuple[int, int] | None
    order: str | None
    rounds_rows: bool

    @property
    def has_group_indices(self) -> bool:
        """Whether the group of each input is stored."""
        return self.strategy == "group" and self.order in ("group", "dynamic")

    @property
    def part_suffixes(self) -> tuple[str, ...]:
        """Suffixes of the stored tensors after the name of the matrix."""
        first = ("_packed", "_shape") if self.packed else ("",)
        mixed = ("_g_idx",) if self.has_group_indices else ()
        return *first, "_scale", *(() if self.symmetric else ("_zero_point",)), *mixed

    def input_groups(self, shape: tuple[int, ...]) -> tuple[int, Tensor | None]:
        """Return the number of groups of inputs, and the group of each input."""
        return group_inputs(shape, self.size if self.strategy == "group" else -1)

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the allowed shapes of the scales."""
        if self.strategy == "tensor":
            return (), (1,), (1, 1)
        if self.strategy == "block":
            assert self.block is not None
            return ((-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])),)
        count, _ = self.input_groups(shape)
        return ((shape[0], 1), (shape[0],)) if count == 1 else ((shape[0], count),)

    @property
    def has_int4(self) -> bool:
        """Whether codes have 4 bits, with scales by output or group of inputs."""
        return self.bits == 4 and self.strategy != "block"

    def read_groups(self, source: TensorSource, name: str, shape: tuple[int, ...]) -> GroupedCodes:
        """Read codes, scales and zero points; raise `ValueError` naming an invalid part."""
        codes = self.read_codes(source, name, shape)
        scale = read_scales(source, f"{name}_scale", *self.scale_shapes(shape))
        zero = self.read_zero_points(source, name, shape)
        count, group = self.input_groups(shape)
        if self.has_group_indices:
            group = read_group_indices(source, f"{name}_g_idx", shape, count)
        wide = (shape[0], count)
        return GroupedCodes(
            codes,
            scale.reshape(-1, count).expand(wide),
            None if zero is None else zero.reshape(-1, count).expand(wide),
            group,
            lowest=-(1 << (self.bits - 1)),
        )

    def read_codes(self, source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read codes `i8[out, in]`, or numbers in FP8."""
        if not self.packed:
            return source.read_stored(name, (shape,), (FP8_TYPE if self.kind == "float" else "I8",))
        width = -(-shape[1] * self.bits // 32)
        stored_shape = source.read_stored(f"{name}_shape", ((2,),), ("I64", "I32")).tolist()
        if stored_shape != list(shape):
            raise ValueError(
                f"{source.tensor_path(f'{name}_shape')}: tensor {f'{name}_shape'!r} "
                f"is {stored_shape}, "
                f"but config.json requires {list(shape)}"
            )
        packed = source.read_stored(f"{name}_packed", ((shape[0], width),), ("I32",))
        return self.to_signed(unpack_codes(packed, self.bits)[:, : shape[1]])

    def to_signed(self, codes: Tensor) -> Tensor:
        """Convert codes stored with an offset to signed ones."""
        return codes.to(torch.int16).sub_(1 << (self.bits - 1)).to(torch.int8)

    def read_zero_points(
        self, source: TensorSource, name: str, shape: tuple[int, ...]
    ) -> Tensor | None:
        """Read zero points in the shape of the scales; None for a symmetric scheme."""
        name = f"{name}_zero_point"
        if self.symmetric:
            return None
        if source.stored_type(name) != "I32":
            return source.read_stored(name, self.scale_shapes(shape), ("I8",))
        (out, _), count = shape, self.input_groups(shape)[0]
        packed = source.read_stored(name, ((-(-out * self.bits // 32), count),), ("I32",))
        return self.to_signed(unpack_codes(packed.t(), self.bits)[:, :out]).t()
