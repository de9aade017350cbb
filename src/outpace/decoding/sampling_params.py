"""What a request chooses of randomness."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from outpace.errors import OptionError

MOST = 2**31
"""What counts stay below, so that tensors of a batch can hold them."""

COLDEST, HOTTEST = 1e-30, 1e30
"""What temperatures lie between, so that tensors of a batch can hold them."""


def is_number(value: object) -> bool:
    """Whether this is a finite number, and not a truth value."""
    try:
        return (
            isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))
        )
    except OverflowError:
        return False


def is_whole(value: object) -> bool:
    """Whether this is a whole number, and not a truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A request's choice of randomness; temperature 0 is greedy.

    `top_p` keeps every token unless those that are more probable already hold more than this
    mass; `top_k` keeps the k most probable; `min_p` keeps what has at least this share of the
    probability of the most probable. A token must pass all, each on the whole distribution. Raises
    `ValueError` for values that mean nothing.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or (
            self.temperature and not COLDEST <= self.temperature < HOTTEST
        ):
            raise OptionError(
                "temperature",
                self.temperature,
                f"temperature must be 0 or lie between {COLDEST:g} and {HOTTEST:g}, "
                f"not {self.temperature!r}",
            )
        if not (is_number(self.top_p) and 0 < self.top_p <= 1):
            message = f"top_p must lie above 0 and be at most 1, not {self.top_p!r}"
            raise OptionError("top_p", self.top_p, message)
        if self.top_k is not None and not (is_whole(self.top_k) and 1 <= self.top_k < MOST):
            raise OptionError(
                "top_k",
                self.top_k,
                f"top_k must be a whole number from 1 to {MOST - 1} (or None for all), "
                f"not {self.top_k!r}",
            )
        if not (is_number(self.min_p) and 0 <= self.min_p <= 1):
            message = f"min_p must lie between 0 and 1, not {self.min_p!r}"
            raise OptionError("min_p", self.min_p, message)
        if not is_whole(self.seed):
            message = f"seed must be a whole number, not {self.seed!r}"
            raise OptionError("seed", self.seed, message)

    @property
    def plain(self) -> bool:
        """Whether tokens are drawn from the model's distribution, neither tempered nor cut."""
        return self.temperature in (0, 1) and not self.cuts

    @property
    def cuts(self) -> bool:
        """Whether some tokens are left out."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0


PLAIN = Sampling()
"""The model's own distribution, at its likeliest token."""
