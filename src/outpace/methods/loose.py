"""The options of loose verification, which several methods have."""

from __future__ import annotations

from outpace.decoding import Verify
from outpace.decoding.fly import MOST
from outpace.methods.method import Length, at_least_one

FLY_WINDOW, FLY_ENTROPY = 6, 0.3
"""Drafts behind a loose one, and the target's entropy there, as the authors of FLy take them."""


def check_fly(verify: Verify, window: int, entropy: float, drafts: Length) -> None:
    """Raise `ValueError` for loose verification that means nothing, of so many drafts in a row."""
    if verify != "fly":
        if (window, entropy) != (FLY_WINDOW, FLY_ENTROPY):
            raise ValueError(
                f"fly_window and fly_entropy are for verify='fly', and verify is {verify!r}"
            )
        return
    at_least_one(fly_window=window)
    if not 0 <= entropy <= MOST:
        raise ValueError(
            f"fly_entropy must lie between 0 and {MOST:.4f}, the entropy of three tokens that are "
            f"equally likely, not {entropy}"
        )
    if drafts != "auto" and drafts <= window:
        raise ValueError(
            f"no draft has fly_window={window} others behind it where {drafts} are verified: draft "
            f"more than {window}, or take a smaller window"
        )
