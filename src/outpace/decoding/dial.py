"""What a method lets be decided: how many tokens a cycle proposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MOST = 64
"""Most tokens that are proposed where a pace decides."""

Passes = Sequence[tuple[str, float, int]]
"""What a cycle runs: the role of a model, rows of each request on average, how often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """What a method lets a `Pace` decide: how many tokens a cycle proposes.

    Attributes:
        values: numbers to choose from, rising, from the least parallel to what the options say.
        passes: the passes of a cycle that proposes so many, where as many are kept on average.
        nested: whether a cycle that proposes more keeps what a shorter one would have kept, so
            that each tells of all that are shorter.
    """

    values: Sequence[int]
    passes: Callable[[int, float], Passes]
    nested: bool = True


def halved(least: int, most: int) -> list[int]:
    """Numbers from `least` to `most`, each half of the next; none far above `MOST`."""
    values = [most := max(least, min(most, MOST))]
    while values[0] // 2 > least:
        values.insert(0, values[0] // 2)
    return values if least >= most else [least, *values]


class Pace(Protocol):
    """Decides for all requests of a method how many tokens their cycles propose.

    Attributes:
        cycles: passes of the target so far.
        rest: cycle until which a request that proposed nothing need not ask again.
    """

    cycles: int
    rest: int

    def run(self, requests: int) -> None:
        """Set the number of running requests."""

    def passed(self, model: str, rows: int, seconds: float) -> None:
        """Report a pass of a model: rows fed and seconds taken."""

    def brought(self, value: int, tokens: int) -> None:
        """Report a cycle: tokens proposed, and tokens committed."""

    def settled(self, behind: int, left: int) -> bool:
        """Whether a request proposes nothing for a while."""

    def value(self, request: object, behind: int, left: int, lost: int) -> int:
        """Number of tokens that the next cycle of a request proposes."""
