"""Partial rotary embedding: only a share of each head is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from outpace.checkpoints.families.rotary import ROPE
from outpace.checkpoints.fields import Field, Given, checked, number
from outpace.models.config import Rope

FACTOR = "partial_rotary_factor"


def partial(usual: float) -> Field:
    """Return the field of a rotary embedding of a share of each head, `usual` by default."""

    def value(published: Given, ours: Given) -> Rope:
        nested = {
            name: published[name] for name in ROPE.names if isinstance(published.get(name), Mapping)
        }
        factors = [
            place[FACTOR]
            for place in (published, *nested.values())
            if place.get(FACTOR) is not None
        ]
        if any(each != factors[0] for each in factors):
            raise ValueError(f"{FACTOR} is {factors[0]} in one place and {factors[-1]} in another")
        part = checked(FACTOR, factors[0] if factors else usual, number)
        size = int(ours["head_dim"] * part)
        if part > 1 or size < 2 or size % 2:
            raise ValueError(
                f"{FACTOR} must rotate pairs of {ours['head_dim']} dimensions, got {part}"
            )
        others = {
            name: {key: each for key, each in place.items() if key != FACTOR}
            for name, place in nested.items()
        }
        return replace(ROPE.value({**published, **others}, ours), share=part)

    return Field((*ROPE.names, FACTOR), value)
