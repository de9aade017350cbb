"""FP8 as DeepSeek and Qwen publish it: numbers of 8 bits, a scale for each block or matrix."""

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
"""What stands behind the name of a matrix for its scales, whose product they are by either name."""

OF_ROWS = (".input_scale", ".activation_scale")
"""Scales that rows were rounded with where this was published; here they are not rounded."""


def block(value: Any) -> tuple[int, int]:
    """Sizes of a block."""
    if isinstance(value, list) and len(value) == 2:
        return count(value[0]), count(value[1])
    raise ValueError("two sizes, such as [128, 128]")


def scheme_of_rows(value: Any) -> str:
    """When scales of rows are found."""
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
    """Matrices in FP8, by blocks `(a, b)` or as a whole."""

    block: tuple[int, int] | None
    about = ABOUT

    @classmethod
    def read(cls, given: Given) -> FP8:
        """The scheme of a `quantization_config`."""
        remedy = f"what loads is {ABOUT}"
        refuse_unknown(given, {*names_of(FIELDS), *FIXED, *FORMATS, *IGNORED}, remedy)
        refuse_other(given, FIXED, {}, remedy)
        for name, known in FORMATS.items():
            checked(name, given.get(name), one_of(known))
        return cls(taken(FIELDS, given)["block"])

    def parts(self, source: Source, name: str) -> tuple[str, ...]:
        """The matrix and its scales."""
        if not is_matrix(name) or name not in source or source.kind(name) != KIND:
            return ()
        return name, self.scale(source, name)

    def scale(self, source: Source, name: str) -> str:
        """The scales of a matrix."""
        found = [f"{name}{end}" for end in SCALES if f"{name}{end}" in source]
        return found[0] if found else f"{name}{SCALES[0]}"

    def plain(self, source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
        """Numbers times the scale of their block."""
        scale = self.scale(source, name)
        numbers = source.stored(name, (shape,), (KIND,))
        if self.block is None:
            return numbers.float() * scales(source, scale, (), (1,)).view(())
        high, wide = self.block
        grid = -(-shape[0] // high), -(-shape[1] // wide)
        return blocks(numbers, scales(source, scale, grid), self.block)

    def idle(self, source: Source, name: str) -> bool:
        """Scales of rows as well."""
        return name.endswith(OF_ROWS) or super().idle(source, name)


def one_of(known: tuple[str, ...]) -> Any:
    """A check that a value is one of these, or not said."""

    def check(value: Any) -> Any:
        if value is None or value in known:
            return value
        raise ValueError(" or ".join(map(repr, known)))

    return check
