"""The rotary embedding's fields of a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outpace.checkpoints.families.attention_windows import FULL_ATTENTION, SLIDING_ATTENTION
from outpace.checkpoints.fields import (
    Field,
    Fields,
    are_equal,
    count,
    field,
    flag,
    inner,
    mapping,
    number,
    parse_value,
    read_known_fields,
    shorten,
)
from outpace.models.config import Rope

SCALE_FACTOR = {"factor": field("factor", number)}
ROPE_LENGTH = {"original_max_position_embeddings": field("original_max_position_embeddings", count)}
STRETCH_FIELDS = SCALE_FACTOR | ROPE_LENGTH
ROPE_SCALINGS: dict[str, dict[str, Field]] = {
    "default": {},
    "linear": SCALE_FACTOR,
    "llama3": STRETCH_FIELDS
    | {name: field(name, number) for name in ("low_freq_factor", "high_freq_factor")},
    "yarn": STRETCH_FIELDS
    | {"beta_fast": field("beta_fast", number, 32.0), "beta_slow": field("beta_slow", number, 1.0)}
    | {"attention_factor": field("attention_factor", number, None)}
    | {"truncate": field("truncate", flag, True)},
}
"""Supported scalings and their fields."""

ROPE_KEYS = ("rope_type", "type", "rope_theta")
ROPE_FIXED = {"partial_rotary_factor": 1.0, "truncate": True}


def parse_base(value: Any) -> float:
    if (theta := number(value)) > 1:
        return theta
    raise ValueError("above 1")


def read_rope(config: Fields, ours: Fields) -> Rope:
    names = ("rope_scaling", "rope_parameters")
    parts = [parse_value(name, config[name], mapping) for name in names if config.get(name)]
    if len(parts) > 1 and not are_equal(*parts):
        raise ValueError("rope_scaling and rope_parameters have different values; keep one")
    bases = [part["rope_theta"] for part in [config, *parts] if part.get("rope_theta") is not None]
    thetas = {parse_value("rope_theta", theta, parse_base) for theta in bases}
    if len(thetas) > 1:
        raise ValueError(f"rope_theta is {min(thetas)} in one place and {max(thetas)} in another")
    return Rope(theta=min(thetas, default=Rope.theta), scaling=scaling(parts[0] if parts else {}))


def scaling(config: Fields) -> Fields | None:
    """Read a scaling with its fields; None without one. Raise `ValueError` for an unknown one."""
    kind = config.get("rope_type", config.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        known = ", ".join(ROPE_SCALINGS)
        raise ValueError(f"rope_scaling {kind!r} is not supported; supported: {known}")
    fields, remedy = ROPE_SCALINGS[kind], f"supported: rope_scaling {kind!r} without it"
    fixed = {name: ROPE_FIXED[name] for name in ROPE_FIXED.keys() - fields.keys()}
    own = read_known_fields(fields, config, fixed=fixed, ignored=ROPE_KEYS, remedy=remedy)
    if kind == "llama3" and own["low_freq_factor"] >= own["high_freq_factor"]:
        raise ValueError("low_freq_factor must be below high_freq_factor")
    return None if kind == "default" else {"rope_type": kind, **own}


ROPE_NAMES = ("rope_theta", "rope_scaling", "rope_parameters")
ROPE = Field(ROPE_NAMES, read_rope)


def read_required_rope(published: Fields, ours: Fields) -> Rope:
    parts = [published, *(published.get(name) for name in ROPE_NAMES)]
    if not any(isinstance(part, Mapping) and part.get("rope_theta") for part in parts):
        raise ValueError("field 'rope_theta' is missing")
    return read_rope(published, ours)


def read_full_rope(published: Fields, ours: Fields) -> Rope:
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
        if not all(are_equal(each, factors[0]) for each in factors):
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
