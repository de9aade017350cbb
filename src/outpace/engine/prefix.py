"""Prefix cache: prompts with a common prefix share its pages.

The key of a causal row depends only on the tokens up to it; in a block, on those up to the end of
the block. So a page full of such keys, at positions equal to their slots, can be reused by every
sequence with the same tokens in the same blocks. Pages are found by name: a keyed hash of the
previous name, of the page's tokens, and of later tokens that its last row sees. A name belongs to
the logical page whose slots were written, never to one that is only reserved.

Text here is one integer per slot: its token, and from bit `TOKEN_BITS` on how many later slots its
row sees. Causal text is therefore just tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import NamedTuple

from outpace.decoding import CAUSAL, Tree
from outpace.engine.cache import PAGE, Cache, Table
from outpace.engine.feed import Feed

SIGHT = 64
"""Low bits of an integer of text that hold the token."""


class Saved(NamedTuple):
    """Number of prefix-cache hits, and of slots that they skipped."""

    hits: int = 0
    slots: int = 0


class Prefix:
    """Finds pages for the prefix of causal and block forwards, and names filled pages.

    Args:
        cache: the cache of the model.
        mask_id: mask token, whose rows are never cached.
        share: whether sequences hold the pages found and copy them on write. Otherwise they are
            copied into contiguous pages, which on a CPU is worth more than the memory.
        is_paired: whether the content of a row also depends on the next token.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        mask_id: int | None = None,
        share: bool = False,
        paired: bool = False,
    ) -> None:
        self.cache = cache
        self.mask_id = mask_id
        self.share = share
        self.paired = paired
        self.salt = os.urandom(16)
        self.saved = Saved()

    def found(self, table: Table, start: int, text: Sequence[int]) -> int:
        """Return how many slots from `start` on with this text are in the cache."""
        return (len(table.names) + len(self.pages(table, start, text))) * PAGE - start

    def pages(self, table: Table, start: int, text: Sequence[int]) -> list[bytes]:
        """Return the names of cached pages with this text, from the first partial page on."""
        if start != len(table.known):
            return []
        text = [*table.known[len(table.names) * PAGE :], *text]
        parent, names = table.names[-1:], []
        for begin in range(0, len(text) - PAGE + 1, PAGE):
            if (page := depends(text, begin)) is None:
                break
            parent = [self.name(parent, page)]
            if parent[0] not in self.cache.named:
                break
            names += parent
        return names

    def skip(self, table: Table, start: int, text: Sequence[int], rows: int) -> int:
        """Attach cached pages; return how many of the first `rows` rows need not run."""
        names, first = self.pages(table, start, text), len(table.names)
        end = min((first + len(names)) * PAGE, start + rows)
        if not names or end <= start:
            return 0
        self.fetch(table, [self.cache.named[name] for name in names], first, end)
        self.cache.touch(names)
        table.known += text[: end - start]
        table.names += names[: end // PAGE - first]
        table.written = max(table.written, end)
        self.saved = Saved(self.saved.hits + 1, self.saved.slots + end - start)
        return end - start

    def fetch(self, table: Table, sources: list[int], first: int, end: int) -> None:
        """Share or copy `sources` into a table from page `first` on, up to slot `end`."""
        # The last page is copied where one of its rows still has to run.
        num_shared = end // PAGE - first if self.share else 0
        targets = table.pages[first : first + len(sources)]
        if to_copy := sources[num_shared:]:
            self.cache.copy(to_copy, targets[num_shared:])
        if num_shared:
            self.cache.hold(sources[:num_shared])
            self.cache.drop(targets[:num_shared])
            table.pages[first : first + num_shared] = sources[:num_shared]
            table.lay_out()

    def writes(self, table: Table, start: int, end: int, text: Sequence[int] = ()) -> None:
        """Drop the records of slots that are about to be written.

        Slots whose recorded content already equals `text` keep it.

        Raises:
            ValueError: a shared page must be copied, and no page is free.
        """
        matches = [old == new for old, new in zip(table.known[start:], text, strict=False)]
        start += [*matches, False].index(False)
        if start < len(table.known):
            valid = start
            while valid and valid + (table.known[valid - 1] >> SIGHT) > start:
                valid -= 1  # its row sees a slot that changes
            first = valid // PAGE
            for page, name in zip(table.pages[first:], table.names[first:], strict=False):
                if self.cache.named.get(name) == page:
                    self.cache.forget(page)
            del table.names[first:], table.known[valid:]
        if self.share:
            for index in range(start // PAGE, -(-end // PAGE)):
                if self.cache.holders[table.pages[index]] > 1:
                    self.part(table, index)

    def part(self, table: Table, index: int) -> None:
        """Copy a page that other tables hold too, and use the copy."""
        copies = self.cache.take(1)
        if copies is None:
            raise ValueError(
                f"slot {index * PAGE} is in a page that other requests share, and no page is "
                "free for a copy: set a larger cache_gib, or switch prefix_cache off"
            )
        page = table.pages[index]
        self.cache.copy([page], copies)
        self.cache.drop([page])
        table.pages[index] = copies[0]
        table.lay_out()

    def learn(self, table: Table, start: int, text: Sequence[int]) -> None:
        """Record that `text` was written from slot `start` on, and name the pages it filled."""
        if start > len(table.known):
            return
        table.known += text[len(table.known) - start :]
        for index in range(len(table.names), len(table.known) // PAGE):
            if (page := depends(table.known, index * PAGE)) is None:
                break
            name = self.name(table.names, page)
            table.names.append(name)
            self.cache.name(table.pages[index], name)
            self.cache.touch([name])

    @staticmethod
    def trimmed(forward: Feed) -> Feed:
        """Return a draft's forward without the features or context that it has cached."""
        if forward.first >= forward.table.spared:
            return forward
        if forward.features is not None:
            return forward.cut(forward.table.spared - forward.start)[1]
        if forward.context is None:
            return forward
        return replace(forward, context=forward.context[forward.table.spared - forward.first :])

    def text(self, forward: Feed) -> list[int]:
        """Return the text of the leading rows that can be cached.

        Rows count up to the first mask and the first position that differs from its slot. A block
        counts only as a whole.
        """
        blocks = forward.pattern if isinstance(forward.pattern, tuple) else ()
        ids = list(forward.ids) if blocks or forward.pattern == CAUSAL else []
        if isinstance(forward.pattern, Tree):
            ids = list(forward.ids[: max(forward.pattern.trunk + 1 - forward.start, 0)])
        if self.paired:
            ids = []
        if forward.positions is not None:
            start, positions = forward.start, enumerate(forward.positions)
            del ids[next((i for i, place in positions if place != start + i), len(ids)) :]
        if self.mask_id in ids:
            del ids[ids.index(self.mask_id) :]
        if not blocks or not ids:
            return ids
        stops = forward.stops()
        size = max(end for end in accumulate(blocks, initial=0) if end <= len(ids))
        if size and stops[size - 1] > forward.start + size:
            size -= blocks[-1]  # the last block sees slots after it
        rows = enumerate(zip(ids[:size], stops, strict=False), forward.start + 1)
        return [token + (stop - next_slot << SIGHT) for next_slot, (token, stop) in rows]

    def name(self, before: list[bytes], tokens: Sequence[int]) -> bytes:
        """Return the name of a page with these tokens after the named pages."""
        parent = before[-1] if before else b""
        return blake2b(parent + str(list(tokens)).encode(), key=self.salt, digest_size=16).digest()


def depends(text: Sequence[int], begin: int) -> Sequence[int] | None:
    """Return the text from `begin` on that a page's keys depend on; None if incomplete."""
    end = begin + PAGE
    end += text[end - 1] >> SIGHT
    return text[begin:end] if end <= len(text) else None


def pairs(text: Sequence[int]) -> list[int]:
    """Return each token with the next one, as an EAGLE draft stores them per slot."""
    return [token << 32 | following for token, following in pairwise(text)]
