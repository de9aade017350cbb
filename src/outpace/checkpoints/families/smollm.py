"""SmolLM3: Llama without rotary embedding in every fourth layer."""

from __future__ import annotations

from typing import Any

from outpace.checkpoints.families.family import BIASED, HUGGING_FACE_NAMES, STATED, Family
from outpace.checkpoints.fields import Field, Given, checked, count, field, flag

EVERY = field("no_rope_layer_interval", count, 4)
FLAGS = "no_rope_layers"


def flags(value: Any) -> list[int]:
    """Parse a list of 0 and 1 per layer."""
    if isinstance(value, list) and all(type(each) is int and each in (0, 1) for each in value):
        return value
    raise ValueError("a list of 0 (no rotary embedding) and 1")


def unrotated(published: Given, ours: Given) -> tuple[int, ...]:
    """Return the layers without rotary embedding."""
    every = EVERY.value(published, ours)
    usual = [int((layer + 1) % every != 0) for layer in range(ours["layers"])]
    found = published.get(FLAGS)
    rotated = checked(FLAGS, usual if found is None else found, flags)
    if len(rotated) != ours["layers"]:
        raise ValueError(f"{FLAGS} must have {len(usual)} entries, got {len(rotated)}")
    return tuple(layer for layer, rotates in enumerate(rotated) if not rotates)


SMOLLM3 = Family(
    name="smollm3",
    about="SmolLM3: some layers without rotary embedding",
    architectures=("SmolLM3ForCausalLM",),
    checkpoints=("HuggingFaceTB/SmolLM3-3B",),
    fields={
        **STATED,
        **BIASED,
        "mlp_bias": field("mlp_bias", flag, False),
        "unrotated": Field((*EVERY.names, FLAGS), unrotated),
    },
    names=HUGGING_FACE_NAMES,
)
