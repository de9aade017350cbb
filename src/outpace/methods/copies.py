"""Copies of earlier text as drafts, and their verification."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated

from outpace.decoding import Forward, Prediction, Read, Request, agreement
from outpace.decoding.request import SharedAnswers

LookupOption = Annotated[bool, "propose a copy instead of a draft where the text repeats"]

DRAFT_MATCH = 3
"""Tokens that must occur earlier for a copy to replace the draft of a model in any case."""

MAX_COPY_TOKENS = 24
"""Most tokens that are copied where a method sets no number."""

MAX_CANDIDATES = 32
"""Earlier occurrences that are compared, the latest first."""

MAX_MATCH_TOKENS = 32
"""Most tokens of a match that are compared, and so of a copy."""

LONG_MATCH = 3
"""Tokens by which occurrences are found first, since single tokens have too many of them."""

END_OF_ANSWER = -1
"""Follows each answer that is shared."""


class OccurrenceIndex:
    """Earlier places in a growing sequence where its last `length` tokens ended.

    A hash table maps `length` tokens to the last place where they ended, and each place to the
    previous one with the same hash. This takes at most 20 bytes per token.
    """

    def __init__(self, length: int, tokens: int = 32) -> None:
        self.length = length
        self.previous = array("i")
        """For each place, the previous one with the same hash, or -1."""
        self.heads = array("i", [-1]) * (2 * tokens)
        """The last place of each hash, or -1."""

    def index_tokens(self, ids: Sequence[int]) -> None:
        if 2 * len(ids) > len(self.heads):
            self.heads = array("i", [-1]) * (4 * len(ids))
            del self.previous[:]
        size, length, heads = len(self.heads), self.length, self.heads
        for place in range(len(self.previous), len(ids)):
            if place + 1 < length:
                self.previous.append(-1)
                continue
            key = hash(tuple(ids[place + 1 - length : place + 1])) % size
            self.previous.append(heads[key])
            heads[key] = place

    def find_matches(self, text: Sequence[int], ids: Sequence[int]) -> tuple[int, list[int]]:
        """Return the length of the longest match of the end of `ids`, and its places in `text`.

        They are in order from the latest. The length is 0 where fewer than `length` tokens match.
        `text` was indexed, and is `ids` itself or another sequence.
        """
        longest, places = self.length, list[int]()
        if text is ids:
            place = self.previous[-1]
        else:
            place = self.heads[hash(tuple(ids[-self.length :])) % len(self.heads)]
        for _ in range(MAX_CANDIDATES):
            if place < 0:
                break
            matched = match_length(text, place, ids)
            if matched > longest:
                longest, places = matched, []
            if matched == longest:
                places.append(place)
            place = self.previous[place]
        return (longest if places else 0), places


@dataclass(slots=True)
class MeanAccepted:
    """Mean accepted tokens of proposals, the first of which is assumed."""

    total: float
    count: int = 1

    @property
    def mean(self) -> float:
        return self.total / self.count

    def add(self, accepted: int) -> None:
        self.total += accepted
        self.count += 1


@dataclass(slots=True)
class Choice:
    """A choice between a short copy and a draft, at `begin` tokens of the text."""

    begin: int
    copied: list[int]
    takes_copy: bool


class CopyFinder:
    """Finds earlier occurrences of the last tokens of a sequence, and what followed them.

    Occurrences of at least `match` tokens count. A search makes a bounded number of comparisons.
    With `shared` texts, they are searched where fewer than `LONG_MATCH` tokens repeat here.
    """

    def __init__(self, match: int, shared: SharedAnswers | None = None) -> None:
        self.shared = shared
        lengths = (LONG_MATCH, match) if match < LONG_MATCH else (match,)
        self.indexes = [OccurrenceIndex(length) for length in lengths]
        self.copies, self.drafts = MeanAccepted(0.0), MeanAccepted(0.5)
        self.choice: Choice | None = None

    def replace_draft(self, request: Request, count: int) -> list[int]:
        """Return the tokens to verify instead of a draft of up to `count` tokens, or none.

        These are all tokens that the constraint forces, or else a copy, whose length does not
        depend on the draft's; it is no cycle of the draft. A copy of fewer than `DRAFT_MATCH`
        tokens replaces the draft while as many tokens of such copies are accepted in the mean.
        """
        self.score_choice(request.ids)
        most = min(MAX_COPY_TOKENS, request.limit - len(request) - 1)
        forced = request.forced_tokens
        copied = forced or self.find_copy(request.ids, most)
        if count and not forced and len(copied) < DRAFT_MATCH:
            takes_copy = bool(copied) and self.copies.mean >= self.drafts.mean
            self.choice = Choice(len(request), copied, takes_copy)
            copied = copied if takes_copy else []
        if copied:
            request.cycle_length = None
        return copied

    def score_choice(self, ids: Sequence[int]) -> None:
        """Count the accepted tokens of the last choice; a copy is scored by the text either way."""
        if (choice := self.choice) is None:
            return
        committed = ids[choice.begin :]
        if choice.copied:
            self.copies.add(agreement(choice.copied, committed))
        if not choice.takes_copy:
            self.drafts.add(len(committed) - 1)
        self.choice = None

    def find_copy(self, ids: Sequence[int], most: int) -> list[int]:
        """Index the new tokens of a sequence; return at most `most` tokens that may follow it."""
        # The longest match is preferred, then the most frequent next token, then the latest place.
        # No more tokens are copied than match, since longer matches continue for longer. A copy
        # that reaches the end of the text repeats.
        for index in self.indexes:
            index.index_tokens(ids)
        found = (index.find_matches(ids, ids) for index in self.indexes)
        longest, places = next(filter(itemgetter(0), found), (0, []))
        if longest < LONG_MATCH and self.shared and (copied := self.shared.find_copy(ids, most)):
            return copied
        if not longest or most < 1:
            return []
        begin = most_frequent(ids, places)
        most, period = min(most, longest), len(ids) - begin
        text = list(ids[begin : begin + most])
        while len(text) < most:
            text.append(text[-period])
        return text


class AnswerStore:
    """Answers of earlier requests to a model, at most 8 MiB with their indexes.

    They fill two parts in turns: where the newer one is full, the older one is dropped.
    """

    def __init__(self, part_tokens: int = 2**18) -> None:
        self.part_tokens = part_tokens
        self.parts: list[tuple[array[int], OccurrenceIndex]] = []

    def add_answer(self, ids: Sequence[int]) -> None:
        ids = [*ids[1 - self.part_tokens :], END_OF_ANSWER]
        if not self.parts or len(self.parts[0][0]) + len(ids) > self.part_tokens:
            index = OccurrenceIndex(LONG_MATCH, self.part_tokens)
            self.parts = [(array("i"), index), *self.parts[:1]]
        text, index = self.parts[0]
        text.extend(ids)
        index.index_tokens(text)

    def find_copy(self, ids: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that followed the longest match of the end of a text."""
        found = [(*index.find_matches(text, ids), text) for text, index in self.parts]
        longest, places, text = max(found, key=itemgetter(0), default=(0, [], array("i")))
        if not longest or most < 1:
            return []
        begin = most_frequent(text, places)
        copied = text[begin : begin + min(most, longest)].tolist()
        return copied[: copied.index(END_OF_ANSWER)] if END_OF_ANSWER in copied else copied


def most_frequent(text: Sequence[int], places: Sequence[int]) -> int:
    """Return the slot after the latest place that the most frequent next token follows."""
    followers: dict[int, list[int]] = {}
    for place in places:
        followers.setdefault(text[place + 1], []).append(place)
    return max(followers.values(), key=len)[0] + 1


def match_length(text: Sequence[int], place: int, ids: Sequence[int]) -> int:
    length, limit, last = 0, min(MAX_MATCH_TOKENS, place + 1, len(ids)), len(ids) - 1
    while length < limit and text[place - length] == ids[last - length]:
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
