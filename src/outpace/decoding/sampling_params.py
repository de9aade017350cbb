"""Sampling options of a request."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.errors import OptionError
from outpace.field_types import Count, Fraction, PositiveFraction, Temperature, check_fields

MIN_TEMPERATURE = 1e-30
"""Least temperature above 0 that tensors of a batch hold."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options of a request; temperature 0 is greedy.

    Each filter applies to the whole distribution, and a token must pass all of them.

    Raises:
        OptionError: a value is out of range.
    """

    temperature: Temperature = 0.0
    top_p: PositiveFraction = 1.0
    """Drops a token if the more probable ones already hold more than this mass."""
    top_k: Count | None = None
    """Keeps the k most probable tokens; None keeps all."""
    min_p: Fraction = 0.0
    """Keeps tokens with at least this share of the highest probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_temperature(temperature=self.temperature)

    @property
    def is_plain(self) -> bool:
        """Whether tokens follow the model's own distribution, neither tempered nor truncated."""
        return self.temperature in (0, 1) and not self.is_truncated

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are excluded."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0


def check_temperature(**values: float) -> None:
    """Raise `OptionError` for a temperature whose inverse overflows."""
    for name, value in values.items():
        if 0 < value < MIN_TEMPERATURE:
            raise OptionError(name, value, f"must be 0 or at least {MIN_TEMPERATURE:g}")


PLAIN_SAMPLING = Sampling()
"""The model's own distribution, at its most probable token."""
