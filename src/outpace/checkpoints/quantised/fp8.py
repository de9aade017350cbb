"""FP8 as published by DeepSeek and Qwen: 8-bit floats with a scale per block or matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outpace.checkpoints.fields import (
    Given,
    checked,
    count,
    field,
    names_of,
    refuse_other,
    refuse_unknown,
    taken,
    words,
)
from outpace.checkpoints.quantised.scheme import Scheme, Source, blocks, is_matrix, scales

KIND = "F8_E4M3"
ABOUT = "FP8 (e4m3) with a scale for each block of each matrix, or for each matrix"
SCALES = ("_scale_inv", "_scale")
"""Suffixes of the scales after the name of the matrix; by either name they are multipliers."""

OF_ROWS = (".input_scale", ".activation_scale")
"""Suffixes of activation scales, which are not used: activations are not quantized by them."""


def block(value: Any) -> tuple[int, int]:
    """Parse the sizes of a block."""
    if isinstance(value, list) and len(value) == 2:
        return count(value[0]), count(value[1])
    raise ValueError("two sizes, such as [128, 128]")


def scheme_of_rows(value: Any) -> str:
    """Parse when activation scales are computed."""
    if value in ("dynamic", "static"):
        return str(value)
    raise ValueError("'dynamic' or 'static'")


FIELDS: Given = {
    "block": field("weight_block_size", block, None),
    "rows": field("activation_scheme", scheme_of_rows, "dynamic"),
}
FIXED: Given = {"quant_method": "fp8", "expert_dtype": "fp8"}
FORMATS = {"fmt": ("e4m3", "float8_e4m3fn"), "scale_fmt": ("float", "ue8m0")}
IGNORED = words(
    "dequantize ignored_layers is_checkpoint_fp8_serialized modules_to_convert "
    "modules_to_not_convert"
)
"""Which matrices are quantised is seen by their types."""


@dataclass(frozen=True)
class FP8(Scheme):
    """FP8 matrices with a scale per `block`, or per matrix if that is None."""

    block: tuple[int, int] | None
    about = ABOUT

    @classmethod
    def read(cls, config: Given) -> FP8:
        """Read a `quantization_config`."""
        remedy = f"supported: {ABOUT}"
        refuse_unknown(config, {*names_of(FIELDS), *FIXED, *FORMATS, *IGNORED}, remedy)
        refuse_other(config, FIXED, {}, remedy)
        for name, known in FORMATS.items():
            checked(name, config.get(name), one_of(known))
        return cls(taken(FIELDS, config)["block"])

    def parts(self, source: Source, name: str) -> tuple[str, ...]:
        """Return the names of the matrix and its scales."""
        if not is_matrix(name) or name not in source or source.kind(name) != KIND:
            return ()
        return name, self.scale(source, name)

    def scale(self, source: Source, name: str) -> str:
        """Return the name of a matrix's scales."""
        found = [f"{name}{end}" for end in SCALES if f"{name}{end}" in source]
        return found[0] if found else f"{name}{SCALES[0]}"

    def plain(self, source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a matrix: elements times the scale of their block."""
        scale = self.scale(source, name)
        numbers = source.stored(name, (shape,), (KIND,))
        if self.block is None:
            return numbers.float() * scales(source, scale, (), (1,)).view(())
        high, wide = self.block
        grid = -(-shape[0] // high), -(-shape[1] // wide)
        return blocks(numbers, scales(source, scale, grid), self.block)

    def idle(self, source: Source, name: str) -> bool:
        """Return whether a tensor has activation scales or changes nothing for another reason."""
        return name.endswith(OF_ROWS) or super().idle(source, name)


def one_of(known: tuple[str, ...]) -> Any:
    """Return a parser that accepts only these values or None."""

    def check(value: Any) -> Any:
        if value is None or value in known:
            return value
        raise ValueError(" or ".join(map(repr, known)))

    return check
