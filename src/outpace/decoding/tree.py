"""Attention pattern of a draft tree: a row sees the committed prefix, its ancestors and itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_TREE_SLOTS = 63
"""Largest number of tree slots in an ancestor mask, which must fit into a signed 64-bit integer."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows of a draft tree, each with an ancestor mask.

    Rows of slots below `root_slot` are causal. The others see all slots below it, themselves, and
    slot `root_slot + j` where bit j of their entry in `ancestor_masks` is set. In a draft tree that
    slot comes before their own, in the same forward or an earlier one. Masks that see each other,
    as in a block, also point at later slots of the same forward.
    """

    root_slot: int
    ancestor_masks: tuple[int, ...]

    @classmethod
    def from_parents(cls, root_slot: int, parents: Sequence[int]) -> Tree:
        """Build a tree whose row i has the parent row `parents[i]`, or the prefix if negative."""
        masks: list[int] = []
        for parent in parents:
            masks.append(0 if parent < 0 else masks[parent] | 1 << parent)
        return cls(root_slot, tuple(masks))

    def causal_rows(self, start: int) -> int:
        """Return the number of rows from slot `start` on that are below the root, so causal."""
        return max(self.root_slot - start, 0)

    def visible_ends(self, start: int) -> list[int]:
        """Return the end of each row's contiguous view, without its ancestors and itself."""
        return [
            *range(start + 1, start + self.causal_rows(start) + 1),
            *[self.root_slot] * len(self.ancestor_masks),
        ]

    def positions(self, start: int) -> list[int]:
        """Return rotary positions of a draft tree: the number of slots that each row sees."""
        prefix = range(start, start + self.causal_rows(start))
        return [*prefix, *(self.root_slot + mask.bit_count() for mask in self.ancestor_masks)]

    def check_rows(self, start: int, rows: int) -> None:
        """Raise `ValueError` where the tree does not match `rows` rows from slot `start` on."""
        causal = self.causal_rows(start)
        if (
            self.root_slot < 0
            or not self.ancestor_masks
            or causal + len(self.ancestor_masks) != rows
        ):
            raise ValueError(
                f"a tree of {len(self.ancestor_masks)} rows with root slot {self.root_slot} "
                f"does not match {rows} rows from slot {start} on"
            )
        slots = min(MAX_TREE_SLOTS, start + rows - self.root_slot)
        for slot, mask in enumerate(self.ancestor_masks, max(start, self.root_slot)):
            if mask < 0 or mask.bit_length() > slots:
                raise ValueError(
                    f"the row of slot {slot} must point at the {slots} slots from root slot "
                    f"{self.root_slot} on"
                )
