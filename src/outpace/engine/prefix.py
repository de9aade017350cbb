"""Prompts that begin alike share what was computed for their beginning.

A causal row's key depends on the tokens up to it and on nothing else; in a block, on those up to
the end of the block. So a page that is full of such keys, at positions equal to their slots, is
worth the same to every sequence that begins with the same tokens in the same blocks. It is found by
its name: a keyed hash of the name before it, of its tokens, and of those behind it that its last
row sees. A name belongs to the logical page whose slots were written, never to one that is only
reserved.

Text here is a number for each slot: its token, and above `SIGHT` how many slots behind it its row
sees, so that causal text is just tokens.
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
"""Bits of a number of text that are the token, and to spare."""


class Saved(NamedTuple):
    """Forwards that found slots filled, and how many slots."""

    hits: int = 0
    slots: int = 0


class Prefix:
    """Finds pages for the beginning of causal and block forwards, and names those they have filled.

    With `share`, a sequence holds the pages that it finds, and gets one of its own before it writes
    there. Without, what is in them is copied to its own, which lie side by side: on a CPU that is
    worth more than the memory. Rows of `mask_id` are no text, and never named. What `paired` rows
    keep depends on the token behind theirs as well.
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
        """How many slots from `start` on, which are to hold this text, pages are found for."""
        return (len(table.names) + len(self.pages(table, start, text))) * PAGE - start

    def pages(self, table: Table, start: int, text: Sequence[int]) -> list[bytes]:
        """Names of the pages with this text that are found, from the first on that is not full."""
        if start != len(table.known):
            return []
        text = [*table.known[len(table.names) * PAGE :], *text]
        before, names = table.names[-1:], []
        for begin in range(0, len(text) - PAGE + 1, PAGE):
            if (page := depends(text, begin)) is None:
                break
            before = [self.name(before, page)]
            if before[0] not in self.cache.named:
                break
            names += before
        return names

    def skip(self, table: Table, start: int, text: Sequence[int], rows: int) -> int:
        """How many of the first `rows` rows need not run, since their slots are found filled."""
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
        """Fill pages of a table, from its page `first` on, as some pages are, up to slot `end`."""
        # The last page is written again where a row of it must run.
        shared = end // PAGE - first if self.share else 0
        own = table.pages[first : first + len(sources)]
        if copied := sources[shared:]:
            self.cache.copy(copied, own[shared:])
        if shared:
            self.cache.hold(sources[:shared])
            self.cache.drop(own[:shared])
            table.pages[first : first + shared] = sources[:shared]
            table.lay_out()

    def writes(self, table: Table, start: int, end: int, text: Sequence[int] = ()) -> None:
        """Called before slots are written: what was known of them is so no longer.

        The first of them get this `text`; as far as that is what they are known to hold, nothing
        changes. Raises `ValueError` where a page is shared and no other is left to write to.
        """
        same = [old == new for old, new in zip(table.known[start:], text, strict=False)]
        start += [*same, False].index(False)
        if start < len(table.known):
            kept = start
            while kept and kept + (table.known[kept - 1] >> SIGHT) > start:
                kept -= 1  # it has seen what is about to change
            first = kept // PAGE
            for page, name in zip(table.pages[first:], table.names[first:], strict=False):
                if self.cache.named.get(name) == page:
                    self.cache.forget(page)
            del table.names[first:], table.known[kept:]
        if self.share:
            for index in range(start // PAGE, -(-end // PAGE)):
                if self.cache.holders[table.pages[index]] > 1:
                    self.part(table, index)

    def part(self, table: Table, index: int) -> None:
        """Give a table a page of its own in place of one that others hold too."""
        fresh = self.cache.take(1)
        if fresh is None:
            raise ValueError(
                f"slot {index * PAGE} lies in a page that other requests share, and no page is "
                "left to copy it to; give the cache more memory, or switch prefix_cache off"
            )
        page = table.pages[index]
        self.cache.copy([page], fresh)
        self.cache.drop([page])
        table.pages[index] = fresh[0]
        table.lay_out()

    def learn(self, table: Table, start: int, text: Sequence[int]) -> None:
        """Called after this text was written from slot `start` on: name the pages full of it.

        Of its beginning it may be known already.
        """
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
    def trimmed(feed: Feed) -> Feed:
        """A feed without the rows of features, or of context, that a draft has found filled."""
        if feed.first >= feed.table.spared:
            return feed
        if feed.features is not None:
            return feed.cut(feed.table.spared - feed.start)[1]
        if feed.context is None:
            return feed
        return replace(feed, context=feed.context[feed.table.spared - feed.first :])

    def text(self, feed: Feed) -> list[int]:
        """Text of the leading rows that are no masks and stand at their own position.

        A block of which a row is otherwise is none.
        """
        blocks = feed.pattern if isinstance(feed.pattern, tuple) else ()
        ids = list(feed.ids) if blocks or feed.pattern == CAUSAL else []
        if isinstance(feed.pattern, Tree):
            ids = list(feed.ids[: max(feed.pattern.trunk + 1 - feed.start, 0)])
        if self.paired:
            ids = []
        if feed.positions is not None:
            start, places = feed.start, enumerate(feed.positions)
            del ids[next((i for i, place in places if place != start + i), len(ids)) :]
        if self.mask_id in ids:
            del ids[ids.index(self.mask_id) :]
        if not blocks or not ids:
            return ids
        stops = feed.stops()
        size = max(end for end in accumulate(blocks, initial=0) if end <= len(ids))
        if size and stops[size - 1] > feed.start + size:
            size -= blocks[-1]  # the last block sees what is stored behind it
        rows = enumerate(zip(ids[:size], stops, strict=False), feed.start + 1)
        return [token + (stop - behind << SIGHT) for behind, (token, stop) in rows]

    def name(self, before: list[bytes], tokens: Sequence[int]) -> bytes:
        """Name of a page of these tokens behind the pages of those names."""
        parent = before[-1] if before else b""
        return blake2b(parent + str(list(tokens)).encode(), key=self.salt, digest_size=16).digest()


def depends(text: Sequence[int], begin: int) -> Sequence[int] | None:
    """The part of a text that the keys of a page depend on, which begins there; None if cut."""
    end = begin + PAGE
    end += text[end - 1] >> SIGHT
    return text[begin:end] if end <= len(text) else None


def pairs(text: Sequence[int]) -> list[int]:
    """Each token with the one behind it: what a draft that extends features keeps in its slot."""
    return [token << 32 | after for token, after in pairwise(text)]
