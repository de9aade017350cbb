"""Sampling options of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from outpace.errors import OptionError

MAX_TENSOR_COUNT = 2**31
"""Exclusive bound of counts that tensors of a batch hold."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30
"""Range of temperatures that tensors of a batch hold."""


def is_finite_real(value: object) -> bool:
    """Return whether a value is a finite number, and not a bool."""
    try:
        return (
            isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))
        )
    except OverflowError:
        return False


def is_whole_number(value: object) -> bool:
    """Return whether a value is a whole number, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options of a request; temperature 0 is greedy.

    Each filter applies to the whole distribution, and a token must pass all of them.

    Raises:
        OptionError: a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    """Drops a token if the more probable ones already hold more than this mass."""
    top_k: int | None = None
    """Keeps the k most probable tokens; None keeps all."""
    min_p: float = 0.0
    """Keeps tokens with at least this share of the highest probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_finite_real(self.temperature) or (
            self.temperature and not MIN_TEMPERATURE <= self.temperature < MAX_TEMPERATURE
        ):
            raise OptionError(
                "temperature",
                self.temperature,
                f"must be 0 or between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}",
            )
        if not (is_finite_real(self.top_p) and 0 < self.top_p <= 1):
            raise OptionError("top_p", self.top_p, "must be above 0 and at most 1")
        if self.top_k is not None and not (
            is_whole_number(self.top_k) and 1 <= self.top_k < MAX_TENSOR_COUNT
        ):
            raise OptionError(
                "top_k",
                self.top_k,
                f"must be a whole number from 1 to {MAX_TENSOR_COUNT - 1}, or None",
            )
        if not (is_finite_real(self.min_p) and 0 <= self.min_p <= 1):
            raise OptionError("min_p", self.min_p, "must be between 0 and 1")
        if not is_whole_number(self.seed):
            raise OptionError("seed", self.seed, "must be a whole number")

    @property
    def is_plain(self) -> bool:
        """Whether tokens follow the model's own distribution, neither tempered nor truncated."""
        return self.temperature in (0, 1) and not self.is_truncated

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are excluded."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0


PLAIN_SAMPLING = Sampling()
"""The model's own distribution, at its most probable token."""
