"""Options of loose verification (FLy), shared by several methods."""

from __future__ import annotations

from typing import Annotated

from outpace.decoding import OptionError, Verify
from outpace.decoding.fly import MAX_FLY_ENTROPY
from outpace.methods.bounds import check_at_least_one
from outpace.methods.method import DraftLength

FLY_WINDOW, FLY_ENTROPY = 6, 0.3
"""Drafts that must match after a loose one, and its least entropy, as set by FLy's authors."""

FlyWindow = Annotated[
    int, "with verify='fly', the drafts after a loose one that must match the target"
]
FlyEntropy = Annotated[
    float, "with verify='fly', the least entropy of the target at a loose draft, in nats"
]


def check_fly(verify: Verify, window: int, entropy: float, drafts: DraftLength) -> None:
    """Raise `ValueError` for invalid options of loose verification, with `drafts` in a row."""
    if verify != "fly":
        usual = {"fly_window": (window, FLY_WINDOW), "fly_entropy": (entropy, FLY_ENTROPY)}
        for name, (value, default) in usual.items():
            if value != default:
                message = f"{name} needs verify='fly', got verify={verify!r}"
                raise OptionError(name, value, message)
        return
    check_at_least_one(fly_window=window)
    if not 0 <= entropy <= MAX_FLY_ENTROPY:
        raise OptionError(
            "fly_entropy",
            entropy,
            f"fly_entropy must be between 0 and {MAX_FLY_ENTROPY:.4f}, the entropy of three "
            f"equally likely tokens, got {entropy}",
        )
    if drafts != "auto" and drafts <= window:
        raise OptionError(
            "fly_window",
            window,
            f"fly_window must be below the number of drafts, {drafts}, got {window}: draft "
            f"more than {window}, or set a smaller window",
        )
