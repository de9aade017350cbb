"""Rotary embeddings that are required, and separate ones for sliding-window layers."""

from __future__ import annotations

from collections.abc import Mapping

from outpace.checkpoints.families.attention_windows import FULL_ATTENTION, SLIDING_ATTENTION
from outpace.checkpoints.families.rotary import ROPE_NAMES, parse_base, read_rope
from outpace.checkpoints.fields import Field, Fields, field, mapping, parse_value
from outpace.models.config import Rope


def read_required_rope(published: Fields, ours: Fields) -> Rope:
    """Read a rotary embedding whose base frequency is required."""
    parts = [published, *(published.get(name) for name in ROPE_NAMES)]
    if not any(isinstance(part, Mapping) and part.get("rope_theta") for part in parts):
        raise ValueError("field 'rope_theta' is missing")
    return read_rope(published, ours)


def read_full_rope(published: Fields, ours: Fields) -> Rope:
    """Read the rotary embedding of full-attention layers."""
    return read_required_rope(layer_rope_fields(published, FULL_ATTENTION), ours)


def sliding_rope(local: str) -> Field:
    """Return the field of the rotary embedding of sliding-window layers.

    Args:
        local: Field of older formats with their base frequency, without scaling.
    """
    plain = field(local, parse_base)

    def read_value(published: Fields, ours: Fields) -> Rope:
        part = layer_rope_fields(published, SLIDING_ATTENTION)
        return (
            Rope(theta=plain.read(published, ours))
            if part is published
            else read_required_rope(part, ours)
        )

    return Field((*ROPE_NAMES, local), read_value)


def layer_rope_fields(published: Fields, kind: str) -> Fields:
    """Return the rotary fields of one type of layer, or of all if they are shared."""
    parts = published.get("rope_parameters")
    if not isinstance(parts, Mapping) or not {FULL_ATTENTION, SLIDING_ATTENTION} & parts.keys():
        return published
    if twice := [name for name in ROPE_NAMES[:2] if published.get(name)]:
        raise ValueError(f"{twice[0]} and rope_parameters have different values; keep one")
    if unknown := parts.keys() - {FULL_ATTENTION, SLIDING_ATTENTION}:
        raise ValueError(f"rope_parameters has {min(unknown)!r}, which is not a layer type")
    return {"rope_parameters": parse_value(f"rope_parameters of {kind}", parts.get(kind), mapping)}


REQUIRED_ROPE, FULL_ROPE = Field(ROPE_NAMES, read_required_rope), Field(ROPE_NAMES, read_full_rope)
