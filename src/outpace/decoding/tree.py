"""Attention pattern of a draft tree: a row sees the committed prefix, its ancestors and itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BITS = 63
"""Largest number of tree slots in an ancestor mask, which must fit into a signed 64-bit integer."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows of a draft tree, each with an ancestor mask.

    Rows of slots below `root_slot` are causal. The others see all slots below it, themselves, and
    slot `root_slot + j` where bit j of their entry in `ancestor_masks` is set. That slot comes
    before their own, in the same forward or an earlier one.
    """

    trunk: int
    bits: tuple[int, ...]

    @classmethod
    def of(cls, trunk: int, parents: Sequence[int]) -> Tree:
        """Build a tree whose row i has the parent row `parents[i]`, or the prefix if negative."""
        masks: list[int] = []
        for parent in parents:
            masks.append(0 if parent < 0 else masks[parent] | 1 << parent)
        return cls(trunk, tuple(masks))

    def first(self, start: int) -> int:
        """Return the number of rows from slot `start` on that are below the root, so causal."""
        return max(self.trunk - start, 0)

    def stops(self, start: int) -> list[int]:
        """Return the end of each row's contiguous view, without its ancestors and itself."""
        return [*range(start + 1, start + self.first(start) + 1), *[self.trunk] * len(self.bits)]

    def positions(self, start: int) -> list[int]:
        """Return rotary positions: a row's position is the number of slots that it sees."""
        prefix = range(start, start + self.first(start))
        return [*prefix, *(self.trunk + mask.bit_count() for mask in self.bits)]

    def check(self, start: int, rows: int) -> None:
        """Raise `ValueError` where the tree does not match `rows` rows from slot `start` on."""
        causal = self.first(start)
        if self.trunk < 0 or not self.bits or causal + len(self.bits) != rows:
            raise ValueError(
                f"a tree of {len(self.bits)} rows with root slot {self.trunk} "
                f"does not match {rows} rows from slot {start} on"
            )
        for slot, mask in enumerate(self.bits, max(start, self.trunk)):
            if mask < 0 or mask.bit_length() > min(BITS, slot - self.trunk):
                raise ValueError(
                    f"the row of slot {slot} must point at earlier slots of the {BITS} "
                    f"from root slot {self.trunk} on"
                )
