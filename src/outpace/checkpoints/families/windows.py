"""Attention windows that follow a rule unless a `config.json` lists them."""

from __future__ import annotations

from outpace.checkpoints.families.sights import (
    EVERY,
    KINDS,
    SLIDING,
    WINDOW,
    checked_window,
    sights,
)
from outpace.checkpoints.fields import Field, Given, count, field
from outpace.models.config import Sight

PATTERN = field("sliding_window_pattern _sliding_window_pattern", count, None)


def sliding(usual: int | None) -> Field:
    """Return the field of windows in all layers; `usual` is the default length."""

    def value(published: Given, ours: Given) -> tuple[Sight, ...]:
        window = checked_window(published.get("sliding_window", usual))
        if window is None or window >= ours["max_length"]:
            return ()
        return (Sight(window=window, causal=True),) * int(ours["layers"])

    return Field(("sliding_window",), value)


def alternating(usual: int) -> Field:
    """Return the field of windows in all but every n-th layer, by default n = `usual`."""

    def value(published: Given, ours: Given) -> tuple[Sight, ...]:
        every = PATTERN.value(published, ours) or usual
        layers = range(1, ours["layers"] + 1)
        listed = published.get(KINDS)
        if listed is None:
            listed = [SLIDING if layer % every else EVERY for layer in layers]
        return sights({KINDS: listed, "sliding_window": published.get("sliding_window")}, ours)

    return Field((*WINDOW.names, *PATTERN.names, KINDS), value)
