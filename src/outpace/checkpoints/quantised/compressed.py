"""Compressed-tensors: integers or FP8, with a separate scheme per group of modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.checkpoints.fields import (
    Given,
    brief,
    checked,
    field,
    flag,
    mapping,
    names_of,
    refuse_other,
    refuse_unknown,
    taken,
    words,
)
from outpace.checkpoints.quantised.fp8 import KIND, block
from outpace.checkpoints.quantised.scheme import (
    Scheme,
    Source,
    bits,
    blocks,
    group_size,
    groups,
    is_matrix,
    order,
    scaled,
    scales,
    unpacked,
    zeros,
)

ABOUT = (
    "compressed-tensors in the formats int-quantized, float-quantized, naive-quantized and "
    "pack-quantized, integers of 4 or 8 bits or FP8"
)
STRATEGIES = ("tensor", "channel", "group", "block")
FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
TYPES = ("int", "float")
ORDERS = ("weight", "static", "group", "dynamic")
"""Orders of the inputs before grouping; the last two need a stored group for each input."""

IDLE = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point")
"""Suffixes of activation scales, which are not used: activations are not quantized by them."""


def choice(known: tuple[str, ...]) -> Callable[[Any], str]:
    """Return a parser that accepts only these values."""

    def check(value: Any) -> str:
        if isinstance(value, str) and value in known:
            return value
        raise ValueError(" or ".join(map(repr, known)))

    return check


def sizes(value: Any) -> tuple[int, int]:
    """Parse the sizes of a block, as `AxB` or as a list."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,8}x\d{1,8}", value):
        value = [int(part) for part in value.split("x")]
    return block(value)


def dense(value: Any) -> None:
    """Check that a sparsity configuration stores zeros explicitly."""
    if mapping(value).get("format", "dense") != "dense":
        raise ValueError("of format 'dense'")


def ordering(value: Any) -> str | None:
    """Parse the order of the inputs."""
    return None if isinstance(value, bool) and not value else choice(ORDERS)(value)


WEIGHTS: Given = {
    "bits": field("num_bits", bits),
    "kind": field("type", choice(TYPES)),
    "symmetric": field("symmetric", flag, True),
    "strategy": field("strategy", choice(STRATEGIES)),
    "size": field("group_size", group_size, -1),
    "block": field("block_structure", sizes, None),
    "order": field("actorder", ordering, None),
}
ALSO = words("dynamic observer observer_kwargs scale_dtype zp_dtype")
"""Ignored fields about how scales were computed and stored."""

CODES = {"num_bits": 8, "type": "int", "symmetric": True}
ROWS: Given = {**CODES, "strategy": "token", "dynamic": True}
"""Dynamic per-token quantization of activations, as in `quantize="int8"`."""

GROUP = words("targets weights input_activations output_activations format")
FIXED: Given = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
IGNORED = words("config_groups format global_compression_ratio ignore sparsity_config version")


@dataclass(frozen=True)
class Numbers:
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
    def mixed(self) -> bool:
        """Whether the group of each input is stored."""
        return self.strategy == "group" and self.order in ("group", "dynamic")

    @property
    def ends(self) -> tuple[str, ...]:
        """Suffixes of the stored tensors after the name of the matrix."""
        first = ("_packed", "_shape") if self.packed else ("",)
        mixed = ("_g_idx",) if self.mixed else ()
        return *first, "_scale", *(() if self.symmetric else ("_zero_point",)), *mixed

    def grid(self, shape: tuple[int, ...]) -> tuple[int, Tensor | None]:
        """Return the number of groups of inputs, and the group of each input."""
        return groups(shape, self.size if self.strategy == "group" else -1)

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the allowed shapes of the scales."""
        if self.strategy == "tensor":
            return (), (1,), (1, 1)
        if self.strategy == "block":
            assert self.block is not None
            return ((-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])),)
        count, _ = self.grid(shape)
        return ((shape[0], 1), (shape[0],)) if count == 1 else ((shape[0], count),)

    def numbers(self, source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read codes `i8[out, in]`, or numbers in FP8."""
        if not self.packed:
            return source.stored(name, (shape,), (KIND if self.kind == "float" else "I8",))
        width = -(-shape[1] * self.bits // 32)
        stored_shape = source.stored(f"{name}_shape", ((2,),), ("I64", "I32")).tolist()
        if stored_shape != list(shape):
            raise ValueError(
                f"{source.path(f'{name}_shape')}: tensor {f'{name}_shape'!r} is {stored_shape}, "
                f"but config.json requires {list(shape)}"
            )
        packed = source.stored(f"{name}_packed", ((shape[0], width),), ("I32",))
        return self.signed(unpacked(packed, self.bits)[:, : shape[1]])

    def signed(self, codes: Tensor) -> Tensor:
        """Convert codes stored with an offset to signed ones."""
        return codes.to(torch.int16).sub_(1 << (self.bits - 1)).to(torch.int8)

    def zero(self, source: Source, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Read zero points in the shape of the scales; None for a symmetric scheme."""
        name = f"{name}_zero_point"
        if self.symmetric:
            return None
        if source.kind(name) != "I32":
            return source.stored(name, self.shapes(shape), ("I8",))
        (out, _), count = shape, self.grid(shape)[0]
        packed = source.stored(name, ((-(-out * self.bits // 32), count),), ("I32",))
        return self.signed(unpacked(packed.t(), self.bits)[:, :out]).t()


@dataclass(frozen=True)
class Compressed(Scheme):
    """Groups of modules; matrices outside all groups are not quantized."""

    groups: tuple[Numbers, ...]
    ignored: tuple[str, ...]
    about = ABOUT

    @classmethod
    def read(cls, config: Given) -> Compressed:
        """Read a `quantization_config`."""
        remedy = f"supported: {ABOUT}"
        refuse_unknown(config, {*FIXED, *IGNORED}, remedy)
        refuse_other(config, FIXED, {}, remedy)
        checked("sparsity_config", config.get("sparsity_config") or {}, dense)
        config_groups = checked("config_groups", config.get("config_groups"), mapping)
        if not config_groups:
            raise ValueError(f"config_groups must not be empty; {remedy}")
        return cls(
            tuple(
                group(f"config_groups.{name}", part, config) for name, part in config_groups.items()
            ),
            checked("ignore", config.get("ignore") or [], texts),
        )

    def find(self, name: str) -> Numbers | None:
        """Return the first group that names a matrix's module, or else all modules, if any."""
        module = name.removesuffix(".weight")
        if not is_matrix(name) or any(matches(target, module) for target in self.ignored):
            return None
        for test in (matches, lambda target, _: target in ("Linear", "Embedding")):
            for each in self.groups:
                if any(test(target, module) for target in each.targets):
                    return each
        return None

    def parts(self, source: Source, name: str) -> tuple[str, ...]:
        """Return the names of codes, scales and other parts; empty if there are no codes."""
        found = self.find(name)
        if found is None:
            return ()
        parts = tuple(f"{name}{end}" for end in found.ends)
        if parts[0] not in source or source.kind(parts[0]) not in (KIND, "I8", "I32"):
            return ()
        return parts

    def plain(self, source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a matrix: (codes - zero point) * scale."""
        group_scheme = self.find(name)
        assert group_scheme is not None
        codes = group_scheme.numbers(source, name, shape)
        scale = scales(source, f"{name}_scale", *group_scheme.shapes(shape))
        zero = group_scheme.zero(source, name, shape)
        if group_scheme.strategy == "block":
            assert group_scheme.block is not None
            return blocks(codes, scale, group_scheme.block)
        count, group = group_scheme.grid(shape)
        if group_scheme.mixed:
            group = order(source, f"{name}_g_idx", shape, count)
        wide = (shape[0], count)
        return scaled(
            codes,
            scale.reshape(-1, count).expand(wide),
            None if zero is None else zero.reshape(-1, count).expand(wide),
            group,
        )

    def codes(
        self, source: Source, name: str, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor] | None:
        """Read 8-bit codes with a scale per output, or return None."""
        group_scheme = self.find(name)
        if group_scheme is None or not self.parts(source, name):
            return None
        if (
            group_scheme.kind,
            group_scheme.bits,
            group_scheme.symmetric,
            group_scheme.strategy,
        ) != ("int", 8, True, "channel"):
            return None
        scale = scales(source, f"{name}_scale", *group_scheme.shapes(shape))
        return group_scheme.numbers(source, name, shape), scale.flatten().contiguous()

    def rounds_rows(self, name: str) -> bool:
        """Return whether the group quantizes activations dynamically."""
        found = self.find(name)
        return found is not None and found.rounds_rows

    def idle(self, source: Source, name: str) -> bool:
        """Return whether a tensor has activation scales, or zero points that are all zero."""
        if name.endswith("_zero_point") and name.removesuffix("_zero_point") in source:
            return zeros(source, name)
        return name.endswith(IDLE) or super().idle(source, name)


def group(name: str, config: Any, whole_config: Given) -> Numbers:
    """Parse one group of a `quantization_config`."""
    config, remedy = checked(name, config, mapping), f"supported: {ABOUT}"
    try:
        refuse_unknown(config, GROUP, remedy)
        weights = checked("weights", config.get("weights"), mapping)
        refuse_unknown(weights, {*names_of(WEIGHTS), *ALSO}, remedy)
        refuse_other(weights, {"dynamic": False}, {}, remedy)
        ours = taken(WEIGHTS, weights)
        number_format = checked(
            "format", config.get("format") or whole_config.get("format"), choice(FORMATS)
        )
        check(ours, number_format)
        targets = checked("targets", config.get("targets"), texts)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    rows = config.get("input_activations")
    return Numbers(
        targets=targets,
        packed=number_format == "pack-quantized",
        rounds_rows=isinstance(rows, Mapping) and all(rows.get(k) == v for k, v in ROWS.items()),
        **ours,
    )


def check(ours: Given, form: str) -> None:
    """Raise `ValueError` for an unsupported combination of values."""
    kinds = {"int-quantized": "int", "pack-quantized": "int", "float-quantized": "float"}
    if ours["kind"] != kinds.get(form, ours["kind"]):
        raise ValueError(f"format {form!r} has no numbers of type {ours['kind']!r}")
    if ours["kind"] == "float" and (ours["bits"], ours["symmetric"]) != (8, True):
        raise ValueError(f"type 'float' must have 8 bits and be symmetric, got {brief(ours)}")
    if ours["strategy"] == "block" and (ours["block"] is None or not ours["symmetric"]):
        raise ValueError("strategy 'block' needs its block_structure and symmetric codes")
    if ours["strategy"] == "group" and ours["size"] == -1:
        raise ValueError("strategy 'group' needs its group_size")


def texts(value: Any) -> tuple[str, ...]:
    """Parse names of modules or classes, or patterns of them."""
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        for entry in value:
            compiled(entry)
        return tuple(value)
    raise ValueError("a list of names and patterns")


def compiled(target: str) -> re.Pattern[str] | None:
    """Compile a target that is a pattern; None for a name."""
    if not target.startswith("re:"):
        return None
    try:
        return re.compile(target.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"valid patterns, which {target!r} is not: {error}") from None


def matches(target: str, module: str) -> bool:
    """Return whether a target names this module."""
    pattern = compiled(target)
    return target == module if pattern is None else pattern.match(module) is not None
