"""Drafts copied from earlier occurrences of the last tokens of a growing text."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from typing import Annotated

from outpace.decoding import Forward, Prediction, Read, Request, agreement

LookupOption = Annotated[bool, "propose a copy instead of a draft where the text repeats"]

DRAFT_MATCH = 3
"""Tokens that must occur earlier for a copy to replace the draft of a model."""

MAX_CANDIDATES = 32
"""Earlier occurrences that are compared, the latest first."""

MAX_MATCH_TOKENS = 32
"""Most tokens of a match that are compared."""


class CopyFinder:
    """Finds earlier occurrences of the last tokens of a sequence, and what followed them.

    A hash table maps `match` tokens to the last place where they ended, and each place to the
    previous one with the same hash. This takes at most 20 bytes per token, and a bounded number of
    comparisons per search.
    """

    def __init__(self, match: int) -> None:
        self.match = match
        self.previous = array("i")
        """For each place, the previous one with the same hash, or -1."""
        self.heads = array("i", [-1]) * 64
        """The last place of each hash, or -1."""

    def propose_tokens(self, request: Request, most: int) -> list[int]:
        """Return at most `most` tokens that the constraint forces, or else a copy, or none."""
        return request.forced_tokens[:most] or self.find_copy(request.ids, most)

    def find_copy(self, ids: Sequence[int], most: int) -> list[int]:
        """Index the new tokens of a sequence; return `most` tokens that may follow it, or none.

        Among earlier occurrences the longest match is preferred, then the most frequent next token,
        then the latest place. A copy that reaches the end of the text repeats.
        """
        self.index_tokens(ids)
        last = len(ids) - 1
        if last < self.match or most < 1:
            return []
        place, longest = self.previous[last], 0
        followers: dict[int, list[int]] = {}
        for _ in range(MAX_CANDIDATES):
            if place < 0:
                break
            length = match_length(ids, place, last)
            if length > longest:
                longest, followers = length, {}
            if length == longest:
                followers.setdefault(ids[place + 1], []).append(place)
            place = self.previous[place]
        if longest < self.match:
            return []
        begin = max(followers.values(), key=len)[0] + 1
        text = list(ids[begin : begin + most])
        period = len(ids) - begin
        while len(text) < most:
            text.append(text[-period])
        return text

    def index_tokens(self, ids: Sequence[int]) -> None:
        """Index the new tokens of a sequence."""
        if 2 * len(ids) > len(self.heads):
            self.heads = array("i", [-1]) * (4 * len(ids))
            del self.previous[:]
        size, match, heads = len(self.heads), self.match, self.heads
        for place in range(len(self.previous), len(ids)):
            if place + 1 < match:
                self.previous.append(-1)
                continue
            key = hash(tuple(ids[place + 1 - match : place + 1])) % size
            self.previous.append(heads[key])
            heads[key] = place


def match_length(ids: Sequence[int], place: int, last: int) -> int:
    """Return the length of the common ending at two places, up to the limit."""
    length, limit = 0, min(MAX_MATCH_TOKENS, place + 1)
    while length < limit and ids[place - length] == ids[last - length]:
        length += 1
    return length


def verify_chain(
    request: Request, drafted: list[int], read: Read
) -> Generator[Forward, Prediction, bool]:
    """Run the last token and the drafted ones; commit those accepted and the model's next one.

    Returns whether to continue.
    """
    n = len(request)
    out = yield Forward(
        ids=[request.ids[-1], *drafted],
        start=n - 1,
        predict=range(n, n + len(drafted) + 1),
        read=read,
    )
    return request.commit(out.tokens[: agreement(drafted, out.tokens) + 1], out.logprobs)
