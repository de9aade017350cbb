"""Range of the draft length (or parallelism), and the interface of its controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_PACED_TOKENS = 64
"""Largest number of tokens that a controller may choose."""

CyclePasses = Sequence[tuple[str, float, int]]
"""Passes of a cycle: role of a model, mean rows per request, how often it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRange:
    """Range of a draft length (or parallelism): numbers of tokens that a cycle may propose."""

    values: Sequence[int]
    """Allowed numbers, rising, from the least parallel to the one of the options."""
    passes: Callable[[int, float], CyclePasses]
    """Passes of a cycle that proposes this many tokens, of which this mean number is accepted."""
    nested: bool = True
    """Whether a longer draft begins with the shorter one, so that its acceptance also measures that
    of all shorter ones."""


def halving_values(least: int, most: int) -> list[int]:
    """Return numbers from `least` to `most`, each half of the next, bounded by the maximum."""
    values = [most := max(least, min(most, MAX_PACED_TOKENS))]
    while values[0] // 2 > least:
        values.insert(0, values[0] // 2)
    return values if least >= most else [least, *values]


class Pace(Protocol):
    """Controller of the draft length for all requests of a method."""

    cycles: int
    """Passes of the target so far."""
    paused_until: int
    """Cycle before which a request that does not draft requests no new length."""

    def set_load(self, requests: int, context: int) -> None:
        """Set the number of running requests, and their mean tokens with those of prompts."""

    def record_pass(self, model: str, rows: int, seconds: float) -> None:
        """Record a pass of a model: its rows and seconds."""

    def record_cycle(self, value: int, tokens: int) -> None:
        """Record a cycle: tokens proposed, and tokens committed."""

    def skips_drafting(self, unread: int, remaining: int) -> bool:
        """Return whether drafting is off for a request for a while."""

    def choose_length(self, request: object, unread: int, remaining: int, lost: int) -> int:
        """Return the number of tokens that the next cycle of a request proposes."""
