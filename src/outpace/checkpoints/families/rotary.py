"""The rotary embedding's fields of a `config.json`."""

from __future__ import annotations

from typing import Any

from outpace.checkpoints.fields import (
    Field,
    Given,
    checked,
    count,
    field,
    flag,
    mapping,
    names_of,
    number,
    refuse_other,
    refuse_unknown,
    taken,
)
from outpace.models.config import Rope

FACTOR = {"factor": field("factor", number)}
TRAINED = {"original_max_position_embeddings": field("original_max_position_embeddings", count)}
STRETCHED = FACTOR | TRAINED
SCALINGS: dict[str, dict[str, Field]] = {
    "default": {},
    "linear": FACTOR,
    "llama3": STRETCHED
    | {name: field(name, number) for name in ("low_freq_factor", "high_freq_factor")},
    "yarn": STRETCHED
    | {"beta_fast": field("beta_fast", number, 32.0), "beta_slow": field("beta_slow", number, 1.0)}
    | {"attention_factor": field("attention_factor", number, None)}
    | {"truncate": field("truncate", flag, True)},
}
"""Supported scalings and their fields."""

ANY = ("rope_type", "type", "rope_theta")
FIXED = {"partial_rotary_factor": 1.0, "truncate": True}


def base(value: Any) -> float:
    """Parse a base frequency, above 1."""
    if (theta := number(value)) > 1:
        return theta
    raise ValueError("above 1")


def rope(config: Given, ours: Given) -> Rope:
    """Read base frequency and scaling, in the old and in the new format."""
    names = ("rope_scaling", "rope_parameters")
    parts = [checked(name, config[name], mapping) for name in names if config.get(name)]
    if len(parts) > 1 and parts[0] != parts[1]:
        raise ValueError("rope_scaling and rope_parameters have different values; keep one")
    bases = [part["rope_theta"] for part in [config, *parts] if part.get("rope_theta") is not None]
    thetas = {checked("rope_theta", theta, base) for theta in bases}
    if len(thetas) > 1:
        raise ValueError(f"rope_theta is {min(thetas)} in one place and {max(thetas)} in another")
    return Rope(theta=min(thetas, default=Rope.theta), scaling=scaling(parts[0] if parts else {}))


def scaling(config: Given) -> Given | None:
    """Read a scaling with its fields; None without one. Raise `ValueError` for an unknown one."""
    kind = config.get("rope_type", config.get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise ValueError(f"rope_scaling {kind!r} is not supported; supported: {known}")
    fields, remedy = SCALINGS[kind], f"supported: rope_scaling {kind!r} without it"
    refuse_unknown(config, {*ANY, *FIXED, *names_of(fields)}, remedy)
    fixed = {name: FIXED[name] for name in FIXED.keys() - fields.keys()}
    refuse_other(config, fixed, {}, remedy)
    own = taken(fields, config)
    if kind == "llama3" and own["low_freq_factor"] >= own["high_freq_factor"]:
        raise ValueError("low_freq_factor must be below high_freq_factor")
    return None if kind == "default" else {"rope_type": kind, **own}


NAMES = ("rope_theta", "rope_scaling", "rope_parameters")
ROPE = Field(NAMES, rope)
