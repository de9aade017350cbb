"""Canvas: the working text of methods that fill masks in any order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from outpace.decoding.forward import IntArray, Prediction
from outpace.decoding.request import Request


class Canvas:
    """Tokens and holes, slot by slot from 0."""

    def __init__(
        self, ids: Iterable[int], mask_id: int, fixed_tokens: Mapping[int, int] | None = None
    ) -> None:
        self.ids = list(ids)
        """Input of the model: a token, or the mask in a hole."""
        self.mask_id = mask_id
        self.holes: list[int] = []
        """Slots of the holes, in order. A mask token in a prompt is a token, not a hole."""
        self.fixed_tokens = fixed_tokens or {}
        """Tokens of slots that are not holes when they are appended."""
        self.logprobs = [0.0] * len(self.ids)

    @classmethod
    def from_request(cls, request: Request) -> Canvas:
        """Start from a request's text, without holes; `request.canvas` shows the progress."""
        canvas = cls(request.ids, request.target.mask_id, request.fixed_tokens)
        request.canvas = canvas.ids
        return canvas

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def prefix_length(self) -> int:
        """Length of the part before the first hole."""
        return self.holes[0] if self.holes else len(self.ids)

    def append_slots(self, count: int) -> None:
        """Append slots: holes, except where tokens are fixed."""
        slots = range(len(self.ids), len(self.ids) + count)
        self.holes.extend(slot for slot in slots if slot not in self.fixed_tokens)
        self.ids.extend(self.fixed_tokens.get(slot, self.mask_id) for slot in slots)
        self.logprobs.extend([0.0] * count)

    def fill_chosen(
        self, holes: Sequence[int], chosen: IntArray, out: Prediction, first: int = 0
    ) -> list[int]:
        """Fill the chosen holes with their predictions; return their slots.

        Args:
            holes: slots of the predicted holes.
            chosen: indices into `holes`.
            out: predictions; hole i has entry `first + i`.
            first: entry of the first hole in `out`.
        """
        slots, entries = [holes[index] for index in chosen], (first + chosen).tolist()
        self.fill_slots(slots, [out.tokens[entry] for entry in entries])
        if (logprobs := out.logprobs) is not None:
            for slot, entry in zip(slots, entries, strict=True):
                self.logprobs[slot] = logprobs[entry]
        return slots

    def replace_chosen(
        self, slots: Sequence[int], chosen: IntArray, out: Prediction, first: int = 0
    ) -> list[int]:
        """Replace the tokens of chosen filled slots by other ones; return the slots that changed.

        Args:
            slots: slots of predicted tokens.
            chosen: indices into `slots`.
            out: predictions; slot i has entry `first + i`.
            first: entry of the first slot in `out`.
        """
        entries = {slots[index]: first + index for index in chosen.tolist()}
        changed = [slot for slot in entries if self.ids[slot] != out.tokens[entries[slot]]]
        logprobs = out.logprobs
        for slot in changed:
            self.ids[slot] = out.tokens[entries[slot]]
            if logprobs is not None:
                self.logprobs[slot] = logprobs[entries[slot]]
        return changed

    def fill_slots(self, slots: Iterable[int], tokens: Sequence[int]) -> None:
        """Put tokens into holes; raise `ValueError` for a slot that is not a hole."""
        for slot, token in zip(slots, tokens, strict=True):
            index = bisect_left(self.holes, slot)
            if index == len(self.holes) or self.holes[index] != slot:
                raise ValueError(f"slot {slot} is not a hole; the holes are {self.holes}")
            del self.holes[index]
            self.ids[slot] = token

    def truncate(self, end: int) -> None:
        """Drop everything from slot `end` on."""
        del self.ids[end:], self.logprobs[end:]
        del self.holes[bisect_left(self.holes, end) :]

    def commit_prefix(self, request: Request, slots: Iterable[int]) -> bool:
        """Commit the part before the first hole; return False once the request has ended."""
        # Where one of `slots`, which were filled last, holds an end-of-sequence, everything after
        # it is dropped, since it cannot be part of the output. Fixed tokens that follow are
        # appended.
        if ends := [slot for slot in slots if self.ids[slot] in request.eos]:
            self.truncate(min(ends) + 1)
        alive = self.commit_until(request)
        if following := request.ids[len(self) :]:
            self.append_slots(len(following))
        return alive

    def commit_until(self, request: Request, end: int | None = None) -> bool:
        """Commit the tokens below slot `end`, by default that of the first hole.

        Returns:
            False once the request has ended.
        """
        new = slice(len(request), self.prefix_length if end is None else end)
        return request.commit(self.ids[new], self.logprobs[new] if request.logprobs else None)

    def filled_slots(self, begin: int) -> list[int]:
        """Return the slots from `begin` on that are not holes."""
        holes = set(self.holes)
        return [slot for slot in range(begin, len(self.ids)) if slot not in holes]

    def holes_within(self, begin: int, end: int) -> list[int]:
        """Return the slots of the holes in `[begin, end)`."""
        return self.holes[bisect_left(self.holes, begin) : bisect_left(self.holes, end)]


def split_blocks(begin: int, end: int, size: int) -> list[tuple[int, int]]:
    """Return `(first, end)` of each block of `size` slots; the last block may be shorter."""
    return [(first, min(first + size, end)) for first in range(begin, end, size)]
