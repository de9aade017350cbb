"""A tree of drafts as a pattern: a row sees the text before the tree, its ancestors, and itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BITS = 63
"""Slots behind the trunk that a row may point at: so an integer of a device holds them."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows of which some hang side by side; what each of those sees is one integer more.

    Rows of slots below `trunk` are causal. The others see all slots below it, themselves, and slot
    `trunk + j` where bit j of their entry in `bits` is set: a slot before their own, of the same
    forward or of one before it.
    """

    trunk: int
    bits: tuple[int, ...]

    @classmethod
    def of(cls, trunk: int, parents: Sequence[int]) -> Tree:
        """A tree whose row i hangs on row `parents[i]`, or on the trunk where that is negative."""
        bits: list[int] = []
        for parent in parents:
            bits.append(0 if parent < 0 else bits[parent] | 1 << parent)
        return cls(trunk, tuple(bits))

    def first(self, start: int) -> int:
        """How many of the rows from slot `start` on stand below the trunk, and are causal."""
        return max(self.trunk - start, 0)

    def stops(self, start: int) -> list[int]:
        """First slot that each row does not see, but for those that its bits name and its own."""
        return [*range(start + 1, start + self.first(start) + 1), *[self.trunk] * len(self.bits)]

    def positions(self, start: int) -> list[int]:
        """Rotary positions: what a row sees is its text, so its length is its place in it."""
        text = range(start, start + self.first(start))
        return [*text, *(self.trunk + own.bit_count() for own in self.bits)]

    def check(self, start: int, rows: int) -> None:
        """Raise `ValueError` where it does not fit `rows` rows from slot `start` on."""
        below = self.first(start)
        if self.trunk < 0 or not self.bits or below + len(self.bits) != rows:
            raise ValueError(
                f"a tree of {len(self.bits)} rows on trunk {self.trunk} does not fit "
                f"{rows} rows from slot {start} on"
            )
        for slot, own in enumerate(self.bits, max(start, self.trunk)):
            if own < 0 or own.bit_length() > min(BITS, slot - self.trunk):
                raise ValueError(
                    f"the row of slot {slot} points at none of the {BITS} slots behind "
                    f"trunk {self.trunk} that stand before it"
                )
