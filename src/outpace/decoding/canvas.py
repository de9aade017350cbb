"""Canvas: tokens with holes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


class Canvas:
    """Tokens with holes among them, slot by slot from 0.

    Attributes:
        ids: what a model is fed: a token, or the mask where there is a hole.
        holes: slots of the holes, in order. A mask token in a prompt is a token, not a hole.
    """

    def __init__(self, ids: Iterable[int], mask_id: int) -> None:
        self.ids = list(ids)
        self.mask_id = mask_id
        self.holes: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def filled(self) -> int:
        """Length of the part before the first hole."""
        return self.holes[0] if self.holes else len(self.ids)

    def extend(self, count: int) -> None:
        """Append holes."""
        self.holes.extend(range(len(self.ids), len(self.ids) + count))
        self.ids.extend([self.mask_id] * count)

    def fill(self, slots: Iterable[int], tokens: Sequence[int]) -> None:
        """Put tokens into holes; raises `ValueError` for a slot that is none."""
        for slot, token in zip(slots, tokens, strict=True):
            place = bisect_left(self.holes, slot)
            if place == len(self.holes) or self.holes[place] != slot:
                raise ValueError(f"slot {slot} is no hole; the holes are {self.holes}")
            del self.holes[place]
            self.ids[slot] = token

    def known(self, begin: int) -> list[int]:
        """Slots from `begin` on that are no holes."""
        holes = set(self.holes)
        return [slot for slot in range(begin, len(self.ids)) if slot not in holes]

    def within(self, begin: int, end: int) -> list[int]:
        """Slots of the holes in `[begin, end)`."""
        return self.holes[bisect_left(self.holes, begin) : bisect_left(self.holes, end)]
