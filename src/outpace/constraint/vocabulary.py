"""Bytes that the tokens of a vocabulary add to a string."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.constraint.dfa import PAUSE, Dfa, IndexArray, TransitionTable
from outpace.constraint.pattern import TooLargeError
from outpace.tokenizer import Tokenizer

MAX_PREFIX_MOVES = 50_000_000
"""Maximum pairs of token prefixes and states to visit; takes about a second."""

VISIT_COST = 2_000
"""Fixed cost of a visit."""

PrefixGroups = dict[bytes, tuple[IndexArray, list[IndexArray], list[IndexArray]]]
"""Token prefixes with equal transitions: their nodes, source states and target states."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixLevel:
    """Token prefixes of one length: a level of the prefix tree."""

    letters: IndexArray
    """Last byte of each prefix, `[n]`."""
    longer: OwnerSpans
    """Range of the extensions of each prefix in the next level."""
    whole: OwnerSpans
    """Range of the tokens equal to each prefix among `tokens`."""
    tokens: IndexArray
    """Tokens that end in this level."""


class OwnerSpans:
    """Ranges of consecutive entries that are sorted by owner."""

    def __init__(self, owners: NDArray[np.signedinteger[Any]], count: int) -> None:
        self.counts = np.bincount(owners, minlength=count)
        self.firsts = self.counts.cumsum() - self.counts

    def pairs_of(self, owners: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return all pairs of an index among `owners` and the index of one of its entries."""
        counts = self.counts[owners]
        which = np.repeat(np.arange(len(owners)), counts)
        ahead = np.repeat(counts.cumsum() - counts, counts)
        return which, self.firsts[owners][which] + np.arange(len(which)) - ahead


class Vocabulary:
    """A prefix tree of all tokens with bytes; `texts` has None for the others."""

    def __init__(self, texts: Sequence[bytes | None]) -> None:
        self.size = len(texts)
        named = sorted((text, token) for token, text in enumerate(texts) if text)
        if not named:
            raise ValueError("no token has text")
        tokens = np.array([token for _, token in named])
        lengths = np.array([len(text) for text, _ in named])
        width = int(lengths.max())
        packed = b"".join(text.ljust(width, b"\0") for text, _ in named)
        table = np.frombuffer(packed, dtype=np.uint8).reshape(-1, width)
        self.levels: list[PrefixLevel] = []
        nodes, letters = np.zeros(len(named), dtype=np.int64), np.zeros(1, dtype=np.int64)
        for length in range(width + 1):
            ends = lengths == length
            whole, ended = OwnerSpans(nodes[ends], len(letters)), tokens[ends]
            tokens, lengths, nodes, table = (e[~ends] for e in (tokens, lengths, nodes, table))
            column = table[:, length].astype(np.int64) if length < width else nodes
            new = np.ones(len(nodes), dtype=bool)
            new[1:] = (nodes[1:] != nodes[:-1]) | (column[1:] != column[:-1])
            self.levels.append(
                PrefixLevel(letters, OwnerSpans(nodes[new], len(letters)), whole, ended)
            )
            letters, nodes = column[new], new.cumsum() - 1

    @property
    def max_token_bytes(self) -> int:
        return len(self.levels) - 1

    def token_moves(self, dfa: Dfa) -> Iterator[tuple[IndexArray, IndexArray, IndexArray]]:
        """Yield tokens with equal transitions, their source states and their target states."""
        # Prefixes are walked together while they lead from state to state alike, and so are states
        # with equal transitions.
        labels, kinds = equal_bytes(dfa.table)
        states = np.arange(len(dfa.table))
        parts: PrefixGroups = {b"": (np.zeros(1, dtype=np.int64), [states], [states])}
        work = 0
        for level, after in zip(self.levels, [*self.levels[1:], None], strict=True):
            longer: PrefixGroups = {}
            for nodes, *pairs in parts.values():
                froms, ats = map(np.concatenate, pairs)
                if len(tokens := level.tokens[level.whole.pairs_of(nodes)[1]]):
                    yield tokens, froms, ats
                children = level.longer.pairs_of(nodes)[1]
                if after is None or not len(children):
                    continue
                for kind, own in group_equal(kinds[ats]):
                    PAUSE.get()()
                    if (work := work + len(children) + len(own) + VISIT_COST) > MAX_PREFIX_MOVES:
                        raise TooLargeError(
                            f"it is too large for a vocabulary of {self.size} tokens: it has "
                            f"{len(states)} states; simplify it or shorten its repeats"
                        )
                    for byte, same in group_equal(labels[kind][after.letters[children]]):
                        if byte >= 0:
                            group = children[same]
                            found = longer.setdefault(group.tobytes(), (group, [], []))
                            found[1].append(froms[own])
                            found[2].append(dfa.table[ats[own], byte].astype(np.int64))
            parts = longer


def group_equal(values: IndexArray) -> Iterator[tuple[int, IndexArray]]:
    order = values.argsort(kind="stable")
    begins = np.flatnonzero(np.diff(values[order], prepend=values.min() - 1))
    for begin, end in pairwise([*begins.tolist(), len(order)]):
        yield int(values[order[begin]]), order[begin:end]


def equal_bytes(table: TransitionTable) -> tuple[IndexArray, IndexArray]:
    """Return the first byte equal to each byte, `[K, 256]` by state kind, and kinds `[S]`.

    It is -1 for bytes that lead nowhere.
    """
    # Most bytes have the same transitions as the previous byte in every state.
    firsts = np.flatnonzero((np.diff(table, axis=1, prepend=-2) != 0).any(0))
    some = table[:, firsts]
    order = some.argsort(axis=1, kind="stable")
    ranked = np.take_along_axis(some, order, 1)
    new = np.diff(ranked, axis=1, prepend=-2) != 0
    begins = np.maximum.accumulate(np.where(new, np.arange(len(firsts)), 0), axis=1)
    labels = np.empty_like(order)
    np.put_along_axis(labels, order, firsts[np.take_along_axis(order, begins, 1)], 1)
    labels[some < 0] = -1
    found, kinds = np.unique(labels.astype(np.int16), axis=0, return_inverse=True)
    wide = np.repeat(found.astype(np.int64), np.diff(firsts, append=256), axis=1)
    return wide, kinds.reshape(-1)


def token_bytes(tokenizer: Tokenizer, size: int) -> list[bytes | None]:
    """Return the bytes of the first `size` tokens; None for special and missing tokens."""
    kinds, added = tokenizer.decoder_types, tokenizer.added_tokens_decoder
    if kinds.isdisjoint({"ByteLevel", "ByteFallback"}):
        raise ValueError(
            "its tokenizer is neither byte-level nor falls back to bytes, so the text of its "
            f"tokens is unknown (decoder {', '.join(sorted(kinds)) or 'none'})"
        )
    texts: list[bytes | None] = [None] * size
    for token in range(min(size, len(tokenizer))):
        if token not in added or not added[token].special:
            texts[token] = tokenizer.token_bytes(token, previous=token)
    return texts


def special_tokens_in(tokenizer: Tokenizer, *texts: str) -> dict[int, str]:
    """Return the special tokens that are part of any of the texts, by id."""
    text, added = "\0".join(texts), tokenizer.added_tokens_decoder.items()
    return {number: str(t) for number, t in added if t.special and str(t) in text}
