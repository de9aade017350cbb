"""Rotary fields of Ministral 3, some of which only matter beyond its first training length."""

from __future__ import annotations

from collections.abc import Mapping

from outpace.checkpoints.families.rotary import ROPE_LENGTH, ROPE_NAMES
from outpace.checkpoints.fields import Fields, count, parse_value

QUERY_SCALE = "llama_4_scaling_beta"
SCALES = ("mscale", "mscale_all_dim")
LENGTH = "max_position_embeddings"


def flatten_ministral_rope(published: Fields) -> Fields:
    """Translate rotary fields that only matter beyond the length of the first training.

    Queries are scaled from that length on, so it is the longest context. Equal scales of the
    attention cancel each other.
    """
    flattened = dict(published)
    for name in ROPE_NAMES:
        if not isinstance(rope := published.get(name), Mapping):
            continue
        first, other = (rope.get(scale) for scale in SCALES)
        if first != other:
            raise ValueError(f"{' and '.join(SCALES)} must be equal, got {first} and {other}")
        own = {key: rope[key] for key in rope if key not in (*SCALES, QUERY_SCALE)}
        flattened[name] = ({} if first is None else {"attention_factor": 1.0}) | own
        if rope.get(QUERY_SCALE) is not None:
            (trained,) = (each.read(rope, {}) for each in ROPE_LENGTH.values())
            length = parse_value(LENGTH, published.get(LENGTH, trained), count)
            flattened[LENGTH] = min(length, trained)
    return flattened
