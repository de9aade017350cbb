"""What a `config.json` says of what each layer sees."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outpace.models.config import Sight
from outpace.models.fields import Field, Given, checked, count, field, flag

EVERY, SLIDING = "full_attention", "sliding_attention"
KINDS = "layer_types"
SLIDES = field("use_sliding_window", flag, False)
PATTERN = field("sliding_window_pattern _sliding_window_pattern", count, None)
WINDOW, CAUSAL = field("sliding_window", count), field("causal is_causal", flag, None)


def kinds(given: Given, ours: Given, known: Collection[str]) -> list[str]:
    """Kind of each layer, all of them full unless they say otherwise."""
    found: Any = given.get(KINDS) or [EVERY] * ours["layers"]
    if not isinstance(found, list) or len(found) != ours["layers"]:
        raise ValueError(f"{KINDS} must be a list of the kinds of {ours['layers']} layers")
    for kind in found:
        if kind not in known:
            raise ValueError(f"{KINDS} has {kind!r}; what loads has {' and '.join(known)} only")
    return found


def full(given: Given, ours: Given) -> tuple[()]:
    """No sights; `ValueError` where a layer would see less than it is shown."""
    kinds(given, ours, (EVERY,))
    return ()


def sights(given: Given, ours: Given) -> tuple[Sight, ...]:
    """Sight of each layer; sliding ones are causal unless a checkpoint says no."""
    slides = [kind == SLIDING for kind in kinds(given, ours, (EVERY, SLIDING))]
    if SLIDES.value(given, ours) and not given.get(KINDS):
        raise ValueError(f"use_sliding_window is True; what loads says of which layers ({KINDS})")
    window = WINDOW.value(given, ours) if any(slides) else None
    causal = CAUSAL.value(given, ours)
    return tuple(
        Sight(window=window if here else None, causal=here if causal is None else causal)
        for here in slides
    )


def sliding(usual: int | None) -> Field:
    """Sights of layers that all slide where there is a window, which is the `usual` one else."""

    def value(given: Given, ours: Given) -> tuple[Sight, ...]:
        window = checked_window(given.get("sliding_window", usual))
        if window is None or window >= ours["max_length"]:
            return ()
        return (Sight(window=window, causal=True),) * int(ours["layers"])

    return Field(("sliding_window",), value)


def alternating(usual: int) -> Field:
    """Sights where each layer of a number sees all and others slide, or as a checkpoint lists."""

    def value(given: Given, ours: Given) -> tuple[Sight, ...]:
        every = PATTERN.value(given, ours) or usual
        layers = range(1, ours["layers"] + 1)
        listed = given.get(KINDS) or [SLIDING if layer % every else EVERY for layer in layers]
        return sights({KINDS: listed, "sliding_window": given.get("sliding_window")}, ours)

    return Field((*WINDOW.names, *PATTERN.names, KINDS), value)


def checked_window(value: Any) -> int | None:
    """A window; `ValueError` for what is none."""
    return None if value is None else checked("sliding_window", value, count)


FULL = Field((KINDS,), full)
SIGHTS = Field((*WINDOW.names, *CAUSAL.names, *SLIDES.names, KINDS), sights)
