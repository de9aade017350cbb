"""Attention windows that follow a rule unless a `config.json` lists them."""

from __future__ import annotations

from outpace.checkpoints.families.attention_windows import (
    FULL_ATTENTION,
    LAYER_TYPES,
    SLIDING_ATTENTION,
    SLIDING_WINDOW,
    parse_window,
    read_windows,
)
from outpace.checkpoints.fields import Field, Fields, count, field
from outpace.models.config import AttentionWindow

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
