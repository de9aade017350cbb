"""Partial rotary embedding: only part of each head is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from outpace.checkpoints.families.attention_windows import FULL_ATTENTION
from outpace.checkpoints.families.ropes import layer_rope_fields
from outpace.checkpoints.families.rotary import ROPE
from outpace.checkpoints.fields import Field, Fields, inner, number, parse_value, shorten
from outpace.models.config import Rope

ROTARY_FACTOR, SPREAD = "partial_rotary_factor", "proportional"


def partial_rope(usual: float) -> Field:
    """Return the field of a rotary embedding of part of each head, `usual` by default."""

    def read_value(published: Fields, ours: Fields) -> Rope:
        nested = {
            name: published[name] for name in ROPE.names if isinstance(published.get(name), Mapping)
        }
        factors = [
            place[ROTARY_FACTOR]
            for place in (published, *nested.values())
            if place.get(ROTARY_FACTOR) is not None
        ]
        if any(each != factors[0] for each in factors):
            raise ValueError(
                f"{ROTARY_FACTOR} is {factors[0]} in one place and {factors[-1]} in another"
            )
        part = parse_value(ROTARY_FACTOR, factors[0] if factors else usual, number)
        size = int(ours["head_dim"] * part)
        if part > 1 or size < 2 or size % 2:
            raise ValueError(
                f"{ROTARY_FACTOR} must rotate pairs of {ours['head_dim']} dimensions, got {part}"
            )
        others = {
            name: {key: each for key, each in place.items() if key != ROTARY_FACTOR}
            for name, place in nested.items()
        }
        return replace(ROPE.read({**published, **others}, ours), share=part)

    return Field((*ROPE.names, ROTARY_FACTOR), read_value)


def read_spread_rope(published: Fields, ours: Fields) -> Rope:
    """Read the rotary embedding of the fastest pairs of each head in full-attention layers."""
    part = inner(layer_rope_fields(published, FULL_ATTENTION), "rope_parameters")
    if (kind := part.get("rope_type")) != SPREAD:
        raise ValueError(f"rope_type of {FULL_ATTENTION} must be {SPREAD!r}, got {shorten(kind)}")
    ours = {**ours, "head_dim": ours["global_heads"].head_dim}
    rope: Rope = partial_rope(1.0).read({"rope_parameters": {**part, "rope_type": "default"}}, ours)
    return replace(rope, spread=True)


SPREAD_ROPE = Field(ROPE.names, read_spread_rope)
