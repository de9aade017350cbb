"""The attention window of each layer, from a `config.json`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outpace.checkpoints.fields import Field, Fields, count, field, flag, parse_value, shorten
from outpace.models.config import AttentionWindow

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
LAYER_TYPES = "layer_types"
USE_SLIDING_WINDOW = field("use_sliding_window", flag, None)
SLIDING_WINDOW, CAUSAL_FIELD = field("sliding_window", count), field("causal is_causal", flag, None)


def read_layer_types(published: Fields, ours: Fields, known: Collection[str]) -> list[str]:
    """Return the type of each layer; full attention by default."""
    found: Any = published.get(LAYER_TYPES)
    if found is None:
        found = [FULL_ATTENTION] * ours["layers"]
    if not isinstance(found, list) or len(found) != ours["layers"]:
        raise ValueError(
            f"{LAYER_TYPES} must list the types of {ours['layers']} layers, got {shorten(found)}"
        )
    for kind in found:
        if kind not in known:
            raise ValueError(f"{LAYER_TYPES} has {kind!r}; supported: {' and '.join(known)} only")
    return found


def require_full_attention(published: Fields, ours: Fields) -> tuple[()]:
    """Return no windows; raise `ValueError` if a layer has one."""
    read_layer_types(published, ours, (FULL_ATTENTION,))
    return ()


def read_windows(published: Fields, ours: Fields) -> tuple[AttentionWindow, ...]:
    """Return the window of each layer; sliding ones are causal unless a field disables that."""
    slides = [
        kind == SLIDING_ATTENTION
        for kind in read_layer_types(published, ours, (FULL_ATTENTION, SLIDING_ATTENTION))
    ]
    window = parse_window(published.get("sliding_window"))
    if any(slides):
        window = SLIDING_WINDOW.read(published, ours)
    check_windows(published, ours, slides)
    causal = CAUSAL_FIELD.read(published, ours)
    return tuple(
        AttentionWindow(window=window if here else None, causal=here if causal is None else causal)
        for here in slides
    )


def check_windows(published: Fields, ours: Fields, slides: list[bool]) -> None:
    used = USE_SLIDING_WINDOW.read(published, ours)
    if used and published.get(LAYER_TYPES) is None:
        raise ValueError(f"use_sliding_window is True, which needs {LAYER_TYPES}")
    sliding = slides.count(True)
    if used is not None and used != any(slides):
        raise ValueError(
            f"use_sliding_window is {used}, but {LAYER_TYPES} has {sliding} sliding layers"
        )
    values = [published.get(name) for name in CAUSAL_FIELD.names]
    if len({value for value in values if isinstance(value, bool)}) > 1:
        raise ValueError(f"{' and '.join(CAUSAL_FIELD.names)} have different values; keep one")


def parse_window(value: Any) -> int | None:
    return None if value is None else parse_value("sliding_window", value, count)


FULL_WINDOWS = Field((LAYER_TYPES,), require_full_attention)
ATTENTION_WINDOWS = Field(
    (*SLIDING_WINDOW.names, *CAUSAL_FIELD.names, *USE_SLIDING_WINDOW.names, LAYER_TYPES),
    read_windows,
)


WINDOW_PATTERN = field("sliding_window_pattern _sliding_window_pattern", count, None)


def sliding_windows(usual: int | None) -> Field:
    """Return the field of windows in all layers; `usual` is the default length."""

    def read_value(published: Fields, ours: Fields) -> tuple[AttentionWindow, ...]:
        window = parse_window(published.get("sliding_window", usual))
        if window is None or window >= ours["max_length"]:
            return ()
        return (AttentionWindow(window=window, causal=True),) * int(ours["layers"])

    return Field(("sliding_window",), read_value)


def alternating_windows(usual: int) -> Field:
    """Return the field of windows in all but every n-th layer, by default n = `usual`."""

    def read_value(published: Fields, ours: Fields) -> tuple[AttentionWindow, ...]:
        every = WINDOW_PATTERN.read(published, ours) or usual
        layers = range(1, ours["layers"] + 1)
        listed = published.get(LAYER_TYPES)
        if listed is None:
            listed = [SLIDING_ATTENTION if layer % every else FULL_ATTENTION for layer in layers]
        return read_windows(
            {LAYER_TYPES: listed, "sliding_window": published.get("sliding_window")}, ours
        )

    return Field((*SLIDING_WINDOW.names, *WINDOW_PATTERN.names, LAYER_TYPES), read_value)
