"""The options of loose verification, which several methods have."""

from __future__ import annotations

from typing import Annotated

from outpace.decoding import OptionError, Verify
from outpace.decoding.fly import MOST
from outpace.methods.bounds import at_least_one
from outpace.methods.method import Length

FLY_WINDOW, FLY_ENTROPY = 6, 0.3
"""Drafts behind a loose one, and the target's entropy there, as the authors of FLy take them."""

FlyWindow = Annotated[
    int, "under verify='fly', the drafts behind a loose one that the target must say"
]
FlyEntropy = Annotated[float, "under verify='fly', how much in doubt the target must be, in nats"]


def check_fly(verify: Verify, window: int, entropy: float, drafts: Length) -> None:
    """Raise `ValueError` for loose verification that means nothing, of so many drafts in a row."""
    if verify != "fly":
        usual = {"fly_window": (window, FLY_WINDOW), "fly_entropy": (entropy, FLY_ENTROPY)}
        for name, (given, default) in usual.items():
            if given != default:
                message = f"{name} is for verify='fly', and verify is {verify!r}"
                raise OptionError(name, given, message)
        return
    at_least_one(fly_window=window)
    if not 0 <= entropy <= MOST:
        raise OptionError(
            "fly_entropy",
            entropy,
            f"fly_entropy must lie between 0 and {MOST:.4f}, the entropy of three tokens that are "
            f"equally likely, not {entropy}",
        )
    if drafts != "auto" and drafts <= window:
        raise OptionError(
            "fly_window",
            window,
            f"fly_window={window} others stand behind no draft where {drafts} are verified: draft "
            f"more than {window}, or take a smaller window",
        )
