"""What a `config.json` says of rotary embedding of a part of each head."""

from __future__ import annotations

from dataclasses import replace

from outpace.models.config import Rope
from outpace.models.families.rotary import ROPE
from outpace.models.fields import Field, Given, field, number


def partial(usual: float) -> Field:
    """Rotary embedding of a share of each head, which is the `usual` one else."""
    share = field("partial_rotary_factor", number, usual)

    def value(given: Given, ours: Given) -> Rope:
        part = share.value(given, ours)
        size = int(ours["head_dim"] * part)
        if part > 1 or size < 2 or size % 2:
            raise ValueError(
                f"partial_rotary_factor is {part}, but must turn pairs of {ours['head_dim']} "
                "dimensions"
            )
        return replace(ROPE.value(given, ours), share=part)

    return Field((*ROPE.names, *share.names), value)
