"""Rotary embeddings that are required, and separate ones for sliding-window layers."""

from __future__ import annotations

from collections.abc import Mapping

from outpace.checkpoints.families.rotary import NAMES, base, rope
from outpace.checkpoints.families.sights import EVERY, SLIDING
from outpace.checkpoints.fields import Field, Given, checked, field, mapping
from outpace.models.config import Rope


def stated(published: Given, ours: Given) -> Rope:
    """Read a rotary embedding whose base frequency is required."""
    parts = [published, *(published.get(name) for name in NAMES)]
    if not any(isinstance(part, Mapping) and part.get("rope_theta") for part in parts):
        raise ValueError("field 'rope_theta' is missing")
    return rope(published, ours)


def everywhere(published: Given, ours: Given) -> Rope:
    """Read the rotary embedding of full-attention layers."""
    return stated(of_kind(published, EVERY), ours)


def sliding(local: str) -> Field:
    """Return the field of the rotary embedding of sliding-window layers.

    Args:
        local: Field of older formats with their base frequency, without scaling.
    """
    plain = field(local, base)

    def value(published: Given, ours: Given) -> Rope:
        part = of_kind(published, SLIDING)
        return Rope(theta=plain.value(published, ours)) if part is published else stated(part, ours)

    return Field((*NAMES, local), value)


def of_kind(published: Given, kind: str) -> Given:
    """Return the rotary fields of one type of layer, or of all if they are shared."""
    parts = published.get("rope_parameters")
    if not isinstance(parts, Mapping) or not {EVERY, SLIDING} & parts.keys():
        return published
    if twice := [name for name in NAMES[:2] if published.get(name)]:
        raise ValueError(f"{twice[0]} and rope_parameters have different values; keep one")
    if unknown := parts.keys() - {EVERY, SLIDING}:
        raise ValueError(f"rope_parameters has {min(unknown)!r}, which is not a layer type")
    return {"rope_parameters": checked(f"rope_parameters of {kind}", parts.get(kind), mapping)}


STATED_ROPE, FULL_ROPE = Field(NAMES, stated), Field(NAMES, everywhere)
