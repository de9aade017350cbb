"""What the tokens of a vocabulary add to a text, as bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.constraint.dfa import Dfa, Ids, Table
from outpace.constraint.pattern import TooLarge

MOST_MOVES = 50_000_000
"""Beginnings of tokens and states that are looked at: a second or so."""

COST = 2_000
"""What it takes to look at any."""

Parts = dict[bytes, tuple[Ids, list[Ids], list[Ids]]]
"""Beginnings of tokens that do the same: which, the states that they may follow, and where they
lead from each."""


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Beginnings of one length that tokens have, as a level of a tree.

    Attributes:
        letters: `[n]`, last byte of each.
        longer: of each, where the beginnings that go on from it lie in the next level.
        whole: of each, where the tokens that it is lie among `tokens`.
    """

    letters: Ids
    longer: Spans
    whole: Spans
    tokens: Ids


class Spans:
    """Neighbours of a list by their owners, who come in order."""

    def __init__(self, owners: NDArray[np.signedinteger[Any]], count: int) -> None:
        self.counts = np.bincount(owners, minlength=count)
        self.firsts = self.counts.cumsum() - self.counts

    def of(self, owners: Ids) -> tuple[Ids, Ids]:
        """All pairs of an owner, as its place among `owners`, and one of its own."""
        counts = self.counts[owners]
        which = np.repeat(np.arange(len(owners)), counts)
        ahead = np.repeat(counts.cumsum() - counts, counts)
        return which, self.firsts[owners][which] + np.arange(len(which)) - ahead


class Vocabulary:
    """A tree of all tokens that have bytes; `texts` has None for those that have none."""

    def __init__(self, texts: Sequence[bytes | None]) -> None:
        self.size = len(texts)
        known = sorted((text, token) for token, text in enumerate(texts) if text)
        if not known:
            raise ValueError("no token has text")
        tokens = np.array([token for _, token in known])
        lengths = np.array([len(text) for text, _ in known])
        width = int(lengths.max())
        packed = b"".join(text.ljust(width, b"\0") for text, _ in known)
        table = np.frombuffer(packed, dtype=np.uint8).reshape(-1, width)
        self.levels: list[Level] = []
        nodes, letters = np.zeros(len(known), dtype=np.int64), np.zeros(1, dtype=np.int64)
        for length in range(width + 1):
            ends = lengths == length
            whole, ended = Spans(nodes[ends], len(letters)), tokens[ends]
            tokens, lengths, nodes, table = (e[~ends] for e in (tokens, lengths, nodes, table))
            column = table[:, length].astype(np.int64) if length < width else nodes
            new = np.ones(len(nodes), dtype=bool)
            new[1:] = (nodes[1:] != nodes[:-1]) | (column[1:] != column[:-1])
            self.levels.append(Level(letters, Spans(nodes[new], len(letters)), whole, ended))
            letters, nodes = column[new], new.cumsum() - 1

    @property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return len(self.levels) - 1

    def moves(self, dfa: Dfa) -> Iterator[tuple[Ids, Ids, Ids]]:
        """Tokens that do the same, states that they may follow, and where each of these leads.

        Beginnings of tokens are walked together for as long as they lead from state to state alike,
        and so are states of which the same bytes lead to one place. Raises `TooLarge` where that
        leaves too much to look at.
        """
        labels, kinds = alike(dfa.table)
        states = np.arange(len(dfa.table))
        parts: Parts = {b"": (np.zeros(1, dtype=np.int64), [states], [states])}
        work = 0
        for level, after in zip(self.levels, [*self.levels[1:], None], strict=True):
            longer: Parts = {}
            for nodes, *pairs in parts.values():
                froms, ats = map(np.concatenate, pairs)
                if len(tokens := level.tokens[level.whole.of(nodes)[1]]):
                    yield tokens, froms, ats
                children = level.longer.of(nodes)[1]
                if after is None or not len(children):
                    continue
                for kind, own in grouped(kinds[ats]):
                    if (work := work + len(children) + len(own) + COST) > MOST_MOVES:
                        raise TooLarge(
                            f"it is too large for a vocabulary of {self.size} tokens: it has "
                            f"{len(states)} states; simplify it or shorten its repeats"
                        )
                    for byte, same in grouped(labels[kind][after.letters[children]]):
                        if byte >= 0:
                            add(longer, children[same], froms[own], dfa.table[ats[own], byte])
            parts = longer


def add(parts: Parts, nodes: Ids, froms: Ids, tos: Table) -> None:
    """States and where they lead to those of the same beginnings."""
    part = parts.setdefault(nodes.tobytes(), (nodes, [], []))
    part[1].append(froms)
    part[2].append(tos.astype(np.int64))


def grouped(values: Ids) -> Iterator[tuple[int, Ids]]:
    """Each value, and where it stands."""
    order = values.argsort(kind="stable")
    begins = np.flatnonzero(np.diff(values[order], prepend=values.min() - 1))
    for begin, end in pairwise([*begins.tolist(), len(order)]):
        yield int(values[order[begin]]), order[begin:end]


def alike(table: Table) -> tuple[Ids, Ids]:
    """The first byte that leads where each byte does, `[K, 256]` by kinds of states; these, `[S]`.

    It is -1 for bytes that lead nowhere.
    """
    # Most bytes do in every state what the one before them does.
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


@cache
def alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (Radford et al., 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in plain]
    shown = {chr(byte): byte for byte in plain}
    return shown | {chr(256 + place): byte for place, byte in enumerate(other)}


def bytes_of(tokenizer: Tokenizer, size: int) -> list[bytes | None]:
    """Bytes of the first `size` tokens; None for special tokens and for what is none.

    Raises `ValueError` for a tokenizer whose tokens are no bytes.
    """
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
    kinds = {part["type"]: part for part in parts(decoder)}
    added = tokenizer.added_tokens_decoder
    names = tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer)))))
    if "ByteLevel" in kinds:
        read = byte_level
    elif "ByteFallback" in kinds:
        read = byte_fallback
    else:
        raise ValueError(
            "its tokenizer is neither byte-level nor falls back to bytes, so that nobody can say "
            f"what text its tokens are (decoder {', '.join(kinds) or 'none'})"
        )
    texts: list[bytes | None] = [None] * size
    for token, name in enumerate(names):
        if token in added:
            texts[token] = None if added[token].special else str(added[token]).encode()
        elif name is not None:
            texts[token] = read(name)
    return texts


def parts(decoder: Any) -> list[dict[str, Any]]:
    """The steps of a decoder."""
    if decoder is None:
        return []
    inner = decoder.get("decoders", [])
    return [decoder, *(each for part in inner for each in parts(part))]


def byte_level(name: str) -> bytes | None:
    """A token whose characters stand for bytes."""
    known = alphabet()
    return bytes(known[each] for each in name) if all(each in known for each in name) else None


def byte_fallback(name: str) -> bytes:
    """A token that is text with marks for spaces, or one byte by its number."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes.fromhex(name[3:5])
    return name.replace("\u2581", " ").encode()
