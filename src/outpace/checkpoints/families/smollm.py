"""SmolLM3: Llama without rotary embedding in every fourth layer."""

from __future__ import annotations

from typing import Any

from outpace.checkpoints.families.family import BIASES, HUGGING_FACE_NAMES, STRICT_DECODER, Family
from outpace.checkpoints.families.gguf_format import GGUFFormat
from outpace.checkpoints.families.gguf_orders import PAIRED_ROWS
from outpace.checkpoints.fields import Field, Fields, count, field, flag, parse_value

NO_ROPE_INTERVAL = field("no_rope_layer_interval", count, 4)
NO_ROPE_LAYERS = "no_rope_layers"


def parse_rope_flags(value: Any) -> list[int]:
    """Parse a list of 0 and 1 per layer."""
    if isinstance(value, list) and all(type(each) is int and each in (0, 1) for each in value):
        return value
    raise ValueError("a list of 0 (no rotary embedding) and 1")


def layers_without_rope(published: Fields, ours: Fields) -> tuple[int, ...]:
    """Return the layers without rotary embedding."""
    every = NO_ROPE_INTERVAL.read(published, ours)
    usual = [int((layer + 1) % every != 0) for layer in range(ours["layers"])]
    found = published.get(NO_ROPE_LAYERS)
    rotated = parse_value(NO_ROPE_LAYERS, usual if found is None else found, parse_rope_flags)
    if len(rotated) != ours["layers"]:
        raise ValueError(f"{NO_ROPE_LAYERS} must have {len(usual)} entries, got {len(rotated)}")
    return tuple(layer for layer, rotates in enumerate(rotated) if not rotates)


SMOLLM3 = Family(
    name="smollm3",
    about="SmolLM3: some layers without rotary embedding",
    architectures=("SmolLM3ForCausalLM",),
    checkpoints=("HuggingFaceTB/SmolLM3-3B",),
    fields={
        **STRICT_DECODER,
        **BIASES,
        "mlp_bias": field("mlp_bias", flag, False),
        "unrotated": Field((*NO_ROPE_INTERVAL.names, NO_ROPE_LAYERS), layers_without_rope),
    },
    names=HUGGING_FACE_NAMES,
    gguf=GGUFFormat(architecture="smollm3", rows=PAIRED_ROWS),
)
