"""Canvas: tokens with holes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from outpace.decoding.sequence import Sequence as Request


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

    def cut(self, end: int) -> None:
        """Drop everything from slot `end` on."""
        del self.ids[end:]
        del self.holes[bisect_left(self.holes, end) :]

    def settle(self, seq: Request, slots: Iterable[int]) -> bool:
        """Commit what stands before the first hole; False once the request has ended.

        `slots` are those filled last. Where one of them ended the answer, what lies behind it is
        dropped: it can be part of no output.
        """
        if ends := [slot for slot in slots if self.ids[slot] in seq.eos]:
            self.cut(min(ends) + 1)
        return seq.commit(self.ids[len(seq) : self.filled])

    def known(self, begin: int) -> list[int]:
        """Slots from `begin` on that are no holes."""
        holes = set(self.holes)
        return [slot for slot in range(begin, len(self.ids)) if slot not in holes]

    def within(self, begin: int, end: int) -> list[int]:
        """Slots of the holes in `[begin, end)`."""
        return self.holes[bisect_left(self.holes, begin) : bisect_left(self.holes, end)]


def blocks(begin: int, end: int, size: int) -> list[tuple[int, int]]:
    """First slot of each block and the one behind its last; the last block may be shorter."""
    return [(first, min(first + size, end)) for first in range(begin, end, size)]
