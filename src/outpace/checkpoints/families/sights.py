"""The attention window of each layer, from a `config.json`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outpace.checkpoints.fields import Field, Given, brief, checked, count, field, flag
from outpace.models.config import Sight

EVERY, SLIDING = "full_attention", "sliding_attention"
KINDS = "layer_types"
SLIDES = field("use_sliding_window", flag, None)
WINDOW, CAUSAL = field("sliding_window", count), field("causal is_causal", flag, None)


def kinds(published: Given, ours: Given, known: Collection[str]) -> list[str]:
    """Return the type of each layer; full attention by default."""
    found: Any = published.get(KINDS)
    if found is None:
        found = [EVERY] * ours["layers"]
    if not isinstance(found, list) or len(found) != ours["layers"]:
        raise ValueError(
            f"{KINDS} must list the types of {ours['layers']} layers, got {brief(found)}"
        )
    for kind in found:
        if kind not in known:
            raise ValueError(f"{KINDS} has {kind!r}; supported: {' and '.join(known)} only")
    return found


def full(published: Given, ours: Given) -> tuple[()]:
    """Return no windows; raise `ValueError` if a layer has one."""
    kinds(published, ours, (EVERY,))
    return ()


def sights(published: Given, ours: Given) -> tuple[Sight, ...]:
    """Return the window of each layer; sliding ones are causal unless a field disables that."""
    slides = [kind == SLIDING for kind in kinds(published, ours, (EVERY, SLIDING))]
    window = checked_window(published.get("sliding_window"))
    if any(slides):
        window = WINDOW.value(published, ours)
    check_agreement(published, ours, slides)
    causal = CAUSAL.value(published, ours)
    return tuple(
        Sight(window=window if here else None, causal=here if causal is None else causal)
        for here in slides
    )


def check_agreement(published: Given, ours: Given, slides: list[bool]) -> None:
    """Raise `ValueError` for contradictory fields about attention windows."""
    used = SLIDES.value(published, ours)
    if used and published.get(KINDS) is None:
        raise ValueError(f"use_sliding_window is True, which needs {KINDS}")
    sliding = slides.count(True)
    if used is not None and used != any(slides):
        raise ValueError(f"use_sliding_window is {used}, but {KINDS} has {sliding} sliding layers")
    values = [published.get(name) for name in CAUSAL.names]
    if len({value for value in values if isinstance(value, bool)}) > 1:
        raise ValueError(f"{' and '.join(CAUSAL.names)} have different values; keep one")


def checked_window(value: Any) -> int | None:
    """Parse the length of a window, or None."""
    return None if value is None else checked("sliding_window", value, count)


FULL = Field((KINDS,), full)
SIGHTS = Field((*WINDOW.names, *CAUSAL.names, *SLIDES.names, KINDS), sights)
