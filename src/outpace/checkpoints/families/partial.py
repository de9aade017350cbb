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

    def value(given: Given, ours: Given) -> Rope:
        nested = {name: given[name] for name in ROPE.names if isinstance(given.get(name), Mapping)}
        said = [
            place[FACTOR] for place in (given, *nested.values()) if place.get(FACTOR) is not None
        ]
        if any(each != said[0] for each in said):
            raise ValueError(f"{FACTOR} is {said[0]} in one place and {said[-1]} in another")
        part = checked(FACTOR, said[0] if said else usual, number)
        size = int(ours["head_dim"] * part)
        if part > 1 or size < 2 or size % 2:
            raise ValueError(
                f"{FACTOR} must rotate pairs of {ours['head_dim']} dimensions, got {part}"
            )
        rest = {
            name: {key: each for key, each in place.items() if key != FACTOR}
            for name, place in nested.items()
        }
        return replace(ROPE.value({**given, **rest}, ours), share=part)

    return Field((*ROPE.names, FACTOR), value)
