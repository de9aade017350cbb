"""Compressed-tensors: integers or FP8, with a separate scheme per group of modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.checkpoints.fields import (
    Fields,
    choice,
    field,
    flag,
    mapping,
    parse_value,
    read_known_fields,
    refuse_unknown_fields,
    shorten,
    words,
)
from outpace.checkpoints.quantised.fp8 import FP8_TYPE, parse_block
from outpace.checkpoints.quantised.scheme import (
    GroupedCodes,
    Scheme,
    TensorSource,
    group_inputs,
    is_all_zero,
    is_matrix,
    parse_bits,
    parse_group_size,
    read_group_indices,
    read_scales,
    scale_blocks,
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
    order: str | bool | None
    rounds_rows: bool

    @property
    def has_group_indices(self) -> bool:
        """Whether the group of each input is stored."""
        return self.strategy == "group" and self.order in ("group", "dynamic")

    def input_groups(self, shape: tuple[int, ...]) -> tuple[int, Tensor | None]:
        """Return the number of groups of inputs, and the group of each input."""
        return group_inputs(shape, self.size if self.strategy == "group" else -1)

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        if self.strategy == "tensor":
            return (), (1,), (1, 1)
        if self.strategy == "block":
            assert self.block is not None
            return ((-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])),)
        count, _ = self.input_groups(shape)
        return ((shape[0], 1), (shape[0],)) if count == 1 else ((shape[0], count),)

    @property
    def has_int4(self) -> bool:
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


COMPRESSED_ABOUT = (
    "compressed-tensors in the formats int-quantized, float-quantized, naive-quantized and "
    "pack-quantized, integers of 4 or 8 bits or FP8"
)
STRATEGIES = ("tensor", "channel", "group", "block")
COMPRESSED_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
NUMBER_KINDS = ("int", "float")
ACTIVATION_ORDERS = (False, "weight", "static", "group", "dynamic")
"""Orders of the inputs before grouping; the last two need a stored group for each input."""

UNUSED_SUFFIXES = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point")
"""Suffixes of activation scales, which are not used: activations are not quantized by them."""


def parse_block_structure(value: Any) -> tuple[int, int]:
    if isinstance(value, str) and re.fullmatch(r"\d{1,8}x\d{1,8}", value):
        value = [int(part) for part in value.split("x")]
    return parse_block(value)


def check_dense(value: Any) -> None:
    """Check that a sparsity configuration stores zeros explicitly."""
    if mapping(value).get("format", "dense") != "dense":
        raise ValueError("of format 'dense'")


WEIGHT_FIELDS: Fields = {
    "bits": field("num_bits", parse_bits),
    "kind": field("type", choice(NUMBER_KINDS)),
    "symmetric": field("symmetric", flag, True),
    "strategy": field("strategy", choice(STRATEGIES)),
    "size": field("group_size", parse_group_size, -1),
    "block": field("block_structure", parse_block_structure, None),
    "order": field("actorder", choice(ACTIVATION_ORDERS), None),
}
WEIGHT_FIXED: Fields = {"dynamic": False}
WEIGHT_IGNORED = words("observer observer_kwargs scale_dtype zp_dtype")
"""Ignored fields about how scales were computed and stored."""

INT8_CODES = {"num_bits": 8, "type": "int", "symmetric": True}
INT8_ROWS: Fields = {**INT8_CODES, "strategy": "token", "dynamic": True}
"""Dynamic per-token quantization of activations, as in `quantize="int8"`."""

GROUP_FIELDS = words("targets weights input_activations output_activations format")
COMPRESSED_FIXED: Fields = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
COMPRESSED_IGNORED = words(
    "config_groups format global_compression_ratio ignore sparsity_config version"
)


@dataclass(frozen=True)
class CompressedTensors(Scheme):
    """Groups of modules; matrices outside all groups are not quantized."""

    groups: tuple[GroupScheme, ...]
    ignored: tuple[str, ...]
    about = COMPRESSED_ABOUT

    @classmethod
    def from_config(cls, config: Fields) -> CompressedTensors:
        remedy = f"supported: {COMPRESSED_ABOUT}"
        read_known_fields(
            {}, config, fixed=COMPRESSED_FIXED, ignored=COMPRESSED_IGNORED, remedy=remedy
        )
        parse_value("sparsity_config", config.get("sparsity_config") or {}, check_dense)
        config_groups = parse_value("config_groups", config.get("config_groups"), mapping)
        if not config_groups:
            raise ValueError(f"config_groups must not be empty; {remedy}")
        return cls(
            tuple(
                parse_group(f"config_groups.{name}", part, config)
                for name, part in config_groups.items()
            ),
            parse_value("ignore", config.get("ignore") or [], parse_targets),
        )

    def find_group(self, name: str) -> GroupScheme | None:
        """Return the first group that names a matrix's module, or else all modules, if any."""
        module = name.removesuffix(".weight")
        if not is_matrix(name) or any(matches_module(target, module) for target in self.ignored):
            return None
        for test in (matches_module, lambda target, _: target in ("Linear", "Embedding")):
            for each in self.groups:
                if any(test(target, module) for target in each.targets):
                    return each
        return None

    def part_names(self, source: TensorSource, name: str) -> tuple[str, ...]:
        """Return the names of codes, scales and other parts; empty if there are no codes."""
        found = self.find_group(name)
        if found is None:
            return ()
        ends = [*(("_packed", "_shape") if found.packed else ("",)), "_scale"]
        ends += ["_zero_point"] * (not found.symmetric) + ["_g_idx"] * found.has_group_indices
        parts = tuple(f"{name}{end}" for end in ends)
        if parts[0] not in source or source.stored_type(parts[0]) not in (FP8_TYPE, "I8", "I32"):
            return ()
        return parts

    def read_matrix(self, source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
        group_scheme = self.find_group(name)
        assert group_scheme is not None
        if group_scheme.block is not None and group_scheme.strategy == "block":
            codes = group_scheme.read_codes(source, name, shape)
            scale = read_scales(source, f"{name}_scale", *group_scheme.scale_shapes(shape))
            return scale_blocks(codes, scale, group_scheme.block)
        return group_scheme.read_groups(source, name, shape).dequantize()

    @property
    def has_int4(self) -> bool:
        return any(group.has_int4 for group in self.groups)

    def read_int4(
        self, source: TensorSource, name: str, shape: tuple[int, ...]
    ) -> GroupedCodes | None:
        found = self.find_group(name)
        if found is None or not found.has_int4 or not self.part_names(source, name):
            return None
        return found.read_groups(source, name, shape)

    def read_codes(
        self, source: TensorSource, name: str, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor] | None:
        group_scheme = self.find_group(name)
        if group_scheme is None or not self.part_names(source, name):
            return None
        if (
            group_scheme.kind,
            group_scheme.bits,
            group_scheme.symmetric,
            group_scheme.strategy,
        ) != ("int", 8, True, "channel"):
            return None
        scale = read_scales(source, f"{name}_scale", *group_scheme.scale_shapes(shape))
        return group_scheme.read_codes(source, name, shape), scale.flatten().contiguous()

    def rounds_rows(self, name: str) -> bool:
        found = self.find_group(name)
        return found is not None and found.rounds_rows

    def is_unused(self, source: TensorSource, name: str) -> bool:
        if name.endswith("_zero_point") and name.removesuffix("_zero_point") in source:
            return is_all_zero(source, name)
        return name.endswith(UNUSED_SUFFIXES) or super().is_unused(source, name)


def parse_group(name: str, config: Any, whole_config: Fields) -> GroupScheme:
    config, remedy = parse_value(name, config, mapping), f"supported: {COMPRESSED_ABOUT}"
    try:
        refuse_unknown_fields(config, GROUP_FIELDS, remedy)
        weights = parse_value("weights", config.get("weights"), mapping)
        ours = read_known_fields(
            WEIGHT_FIELDS, weights, fixed=WEIGHT_FIXED, ignored=WEIGHT_IGNORED, remedy=remedy
        )
        number_format = parse_value(
            "format", config.get("format") or whole_config.get("format"), choice(COMPRESSED_FORMATS)
        )
        check_weight_fields(ours, number_format)
        targets = parse_value("targets", config.get("targets"), parse_targets)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    rows = config.get("input_activations")
    return GroupScheme(
        targets=targets,
        packed=number_format == "pack-quantized",
        rounds_rows=isinstance(rows, Mapping)
        and all(rows.get(k) == v for k, v in INT8_ROWS.items()),
        **ours,
    )


def check_weight_fields(ours: Fields, form: str) -> None:
    """Raise `ValueError` for an unsupported combination of values."""
    kinds = {"int-quantized": "int", "pack-quantized": "int", "float-quantized": "float"}
    if ours["kind"] != kinds.get(form, ours["kind"]):
        raise ValueError(f"format {form!r} has no numbers of type {ours['kind']!r}")
    if ours["kind"] == "float" and (ours["bits"], ours["symmetric"]) != (8, True):
        raise ValueError(f"type 'float' must have 8 bits and be symmetric, got {shorten(ours)}")
    if ours["strategy"] == "block" and (ours["block"] is None or not ours["symmetric"]):
        raise ValueError("strategy 'block' needs its block_structure and symmetric codes")
    if ours["strategy"] == "group" and ours["size"] == -1:
        raise ValueError("strategy 'group' needs its group_size")


def parse_targets(value: Any) -> tuple[str, ...]:
    """Parse names of modules or classes, or patterns of them."""
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        for entry in value:
            compile_target(entry)
        return tuple(value)
    raise ValueError("a list of names and patterns")


def compile_target(target: str) -> re.Pattern[str] | None:
    """Compile a target that is a pattern; None for a name."""
    if not target.startswith("re:"):
        return None
    try:
        return re.compile(target.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"valid patterns, which {target!r} is not: {error}") from None


def matches_module(target: str, module: str) -> bool:
    pattern = compile_target(target)
    return target == module if pattern is None else pattern.match(module) is not None
