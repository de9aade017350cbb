"""How llama.cpp writes models with gated delta layers into GGUF files."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outpace.checkpoints.families.attention_windows import FULL_ATTENTION, LAYER_TYPES
from outpace.checkpoints.families.gguf_format import GGUFFormat, width_per_head
from outpace.checkpoints.families.gguf_orders import subtract_one
from outpace.checkpoints.families.hybrid import LINEAR_ATTENTION
from outpace.checkpoints.families.hybrid_orders import (
    DELTA,
    SPREAD_COLUMNS,
    SPREAD_ROWS,
    group_parts,
    part_rows,
)
from outpace.checkpoints.families.partial import ROTARY_FACTOR
from outpace.checkpoints.fields import Fields, count, few, parse_value, shorten

RECURRENT_LAYERS, ROTATED_SIZE = "attention.recurrent_layers", "rope.dimension_count"
VALUE_SIZE, VALUE_HEADS = "ssm.inner_size", "linear_num_value_heads"
ROPE_SECTIONS = "rope.dimension_sections"
NORMS = ("layernorm.weight", "_norm.weight", "model.norm.weight")
"""Ends of the names of norms whose code adds 1; that of the mixer is not one of them."""


def derive_fields(metadata: dict[str, Any], fields: Fields) -> Fields:
    """Remove metadata of gated delta layers, and return the published fields that follow."""
    metadata.pop(ROPE_SECTIONS, None)  # matters only for images
    size = parse_value("head_dim", fields.get("head_dim") or width_per_head(fields), few)
    rotated = parse_value(ROTATED_SIZE, metadata.pop(ROTATED_SIZE, size), count)
    values = parse_value(VALUE_SIZE, metadata.pop(VALUE_SIZE, None), count)
    heads = parse_value(VALUE_HEADS, fields.get(VALUE_HEADS), few)
    if values % heads:
        raise ValueError(f"{VALUE_SIZE} must be a multiple of {heads} heads, got {values}")
    derived = {"linear_value_head_dim": values // heads, ROTARY_FACTOR: rotated / size}
    if (recurrent := metadata.pop(RECURRENT_LAYERS, None)) is None:
        return derived
    if not isinstance(recurrent, list) or any(each not in (0, 1) for each in recurrent):
        raise ValueError(f"{RECURRENT_LAYERS} must be a list of booleans, got {shorten(recurrent)}")
    kinds = [(FULL_ATTENTION, LINEAR_ATTENTION)[each] for each in recurrent]
    layers = parse_value("num_hidden_layers", fields.get("num_hidden_layers"), few)
    return {**derived, LAYER_TYPES: kinds[:layers]}


def restore_log(decay: Tensor) -> Tensor:
    """Return the published logarithms; the file has the negative decays."""
    return (-decay).log()


def hybrid_format(architecture: str, **others: Any) -> GGUFFormat:
    """Return the format of an architecture with gated delta layers."""
    tensors = {f"{DELTA}dt_bias": (f"{DELTA}dt_proj.bias",), **others.pop("tensors", {})}
    return GGUFFormat(
        architecture=architecture,
        derived=derive_fields,
        values={f"{DELTA}A_log": restore_log, **dict.fromkeys(NORMS, subtract_one)},
        tensors=tensors,
        **others,
    )


QWEN3_5_GGUF = hybrid_format("qwen35", rows=SPREAD_ROWS, columns=SPREAD_COLUMNS)
QWEN3_5_MOE_GGUF = hybrid_format("qwen35moe", rows=SPREAD_ROWS, columns=SPREAD_COLUMNS)
QKVZ = f"{DELTA}in_proj_qkvz.weight"
QWEN3_NEXT_GGUF = hybrid_format(
    "qwen3next",
    tensors={QKVZ: (f"{DELTA}in_proj_qkv.weight", f"{DELTA}in_proj_z.weight")},
    rows={QKVZ: group_parts},
    sizes={QKVZ: part_rows},
)
