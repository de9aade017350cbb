"""FP8 as published by DeepSeek and Qwen: 8-bit floats with a scale per block or matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outpace.checkpoints.fields import Fields, choice, count, field, read_known_fields, words
from outpace.checkpoints.quantised.scheme import (
    Scheme,
    TensorSource,
    is_matrix,
    read_scales,
    scale_blocks,
)

FP8_TYPE = "F8_E4M3"
FP8_ABOUT = "FP8 (e4m3) with a scale for each block of each matrix, or for each matrix"
SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Suffixes of the scales after the name of the matrix; by either name they are multipliers."""

ROW_SCALE_SUFFIXES = (".input_scale", ".activation_scale")
"""Suffixes of activation scales, which are not used: activations are not quantized by them."""


def parse_block(value: Any) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2:
        return count(value[0]), count(value[1])
    raise ValueError("two sizes, such as [128, 128]")


FP8_FIELDS: Fields = {
    "block": field("weight_block_size", parse_block, None),
    "rows": field("activation_scheme", choice(("dynamic", "static")), None),
    "format": field("fmt", choice(("e4m3", "float8_e4m3fn")), None),
    "scales": field("scale_fmt", choice(("float", "ue8m0")), None),
}
FP8_FIXED: Fields = {"quant_method": "fp8", "expert_dtype": "fp8"}
FP8_IGNORED = words(
    "dequantize ignored_layers is_checkpoint_fp8_serialized modules_to_convert "
    "modules_to_not_convert"
)
"""Ignored: the tensors' types show which matrices are quantized."""


@dataclass(frozen=True)
class FP8(Scheme):
    """FP8 matrices with a scale per `block`, or per matrix if that is None."""

    block: tuple[int, int] | None
    about = FP8_ABOUT

    @classmethod
    def from_config(cls, config: Fields) -> FP8:
        remedy = f"supported: {FP8_ABOUT}"
        ours = read_known_fields(
            FP8_FIELDS, config, fixed=FP8_FIXED, ignored=FP8_IGNORED, remedy=remedy
        )
        return cls(ours["block"])

    def part_names(self, source: TensorSource, name: str) -> tuple[str, ...]:
        """Return the names of the matrix and its scales."""
        if not is_matrix(name) or name not in source or source.stored_type(name) != FP8_TYPE:
            return ()
        return name, self.scale_name(source, name)

    def scale_name(self, source: TensorSource, name: str) -> str:
        found = [f"{name}{end}" for end in SCALE_SUFFIXES if f"{name}{end}" in source]
        return found[0] if found else f"{name}{SCALE_SUFFIXES[0]}"

    def read_matrix(self, source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
        scale = self.scale_name(source, name)
        numbers = source.read_stored(name, (shape,), (FP8_TYPE,))
        if self.block is None:
            return numbers.float() * read_scales(source, scale, (), (1,)).view(())
        high, wide = self.block
        grid = -(-shape[0] // high), -(-shape[1] // wide)
        return scale_blocks(numbers, read_scales(source, scale, grid), self.block)

    def is_unused(self, source: TensorSource, name: str) -> bool:
        return name.endswith(ROW_SCALE_SUFFIXES) or super().is_unused(source, name)
