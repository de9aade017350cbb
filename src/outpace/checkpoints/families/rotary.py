"""The rotary embedding's fields of a `config.json`."""

from __future__ import annotations

from typing import Any

from outpace.checkpoints.fields import (
    Field,
    Fields,
    count,
    field,
    flag,
    mapping,
    number,
    parse_value,
    published_names,
    read_fields,
    refuse_others,
    refuse_unknown_fields,
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
    """Parse a base frequency, above 1."""
    if (theta := number(value)) > 1:
        return theta
    raise ValueError("above 1")


def read_rope(config: Fields, ours: Fields) -> Rope:
    """Read base frequency and scaling, in the old and in the new format."""
    names = ("rope_scaling", "rope_parameters")
    parts = [parse_value(name, config[name], mapping) for name in names if config.get(name)]
    if len(parts) > 1 and parts[0] != parts[1]:
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
    refuse_unknown_fields(config, {*ROPE_KEYS, *ROPE_FIXED, *published_names(fields)}, remedy)
    fixed = {name: ROPE_FIXED[name] for name in ROPE_FIXED.keys() - fields.keys()}
    refuse_others(config, fixed, {}, remedy)
    own = read_fields(fields, config)
    if kind == "llama3" and own["low_freq_factor"] >= own["high_freq_factor"]:
        raise ValueError("low_freq_factor must be below high_freq_factor")
    return None if kind == "default" else {"rope_type": kind, **own}


ROPE_NAMES = ("rope_theta", "rope_scaling", "rope_parameters")
ROPE = Field(ROPE_NAMES, read_rope)
