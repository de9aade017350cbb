"""Rotary embedding that must be said, and that of layers with a window that have their own."""

from __future__ import annotations

from collections.abc import Mapping

from outpace.checkpoints.families.rotary import NAMES, base, rope
from outpace.checkpoints.families.sights import EVERY, SLIDING
from outpace.checkpoints.fields import Field, Given, checked, field, mapping
from outpace.models.config import Rope


def stated(given: Given, ours: Given) -> Rope:
    """Rotary embedding whose base frequency must be given."""
    parts = [given, *(given.get(name) for name in NAMES)]
    if not any(isinstance(part, Mapping) and part.get("rope_theta") for part in parts):
        raise ValueError("the field 'rope_theta' is missing")
    return rope(given, ours)


def everywhere(given: Given, ours: Given) -> Rope:
    """Rotary embedding of the layers that see all, where those with a window have their own."""
    return stated(of_kind(given, EVERY), ours)


def sliding(local: str) -> Field:
    """Rotary embedding of the layers with a window, of which old spellings say only a `local` base.

    They are not scaled there.
    """
    plain = field(local, base)

    def value(given: Given, ours: Given) -> Rope:
        part = of_kind(given, SLIDING)
        return Rope(theta=plain.value(given, ours)) if part is given else stated(part, ours)

    return Field((*NAMES, local), value)


def of_kind(given: Given, kind: str) -> Given:
    """What is said of one kind of layers, or of all."""
    parts = given.get("rope_parameters")
    if not isinstance(parts, Mapping) or not {EVERY, SLIDING} & parts.keys():
        return given
    if twice := [name for name in NAMES[:2] if given.get(name)]:
        raise ValueError(f"{twice[0]} and rope_parameters say different things; keep one")
    if unknown := parts.keys() - {EVERY, SLIDING}:
        raise ValueError(f"rope_parameters has {min(unknown)!r}, which is no kind of layers")
    return {"rope_parameters": checked(f"rope_parameters of {kind}", parts.get(kind), mapping)}


STATED_ROPE, FULL_ROPE = Field(NAMES, stated), Field(NAMES, everywhere)
