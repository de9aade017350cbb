"""Prefix cache: prompts with a common prefix share its pages.

The key of a causal row depends only on the tokens up to it; in a block, on those up to the end of
the block. So a page full of such keys, at positions equal to their slots, can be reused by every
sequence with the same tokens in the same blocks. Pages are found by name: a keyed hash of the
previous name, of the page's tokens, and of later tokens that its last row sees. The first page of a
sequence with an adapter follows the adapter's name. A name belongs to the logical page whose slots
were written, never to one that is only reserved.

Text here is one integer per slot: its token, and from bit `TOKEN_BITS` on how many later slots its
row sees. Causal text is therefore just tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import NamedTuple

from outpace.decoding import CAUSAL, Tree
from outpace.engine.cache import PAGE_SIZE, PagedCache, PageStates, PageTable
from outpace.engine.pack import ScheduledForward
from outpace.engine.prefix_store import (
    PrefixStore,
    fill_tensors,
    page_file,
    state_tensors,
    states_file,
)

TOKEN_BITS = 64
"""Low bits of an integer of text that hold the token."""


class PrefixStats(NamedTuple):
    """Number of prefix-cache hits, and of slots that they skipped."""

    hits: int = 0
    slots: int = 0


class PrefixCache:
    """Finds pages for the prefix of causal and block forwards, and names filled pages.

    Args:
        cache: the cache of the model.
        mask_id: mask token, whose rows are never cached.
        is_paired: whether the content of a row also depends on the next token.
        blank_states: returns the states at a slot, to be filled, where rows need those before them.
        store: where pages are kept that leave memory.
        identity: what the content of a page depends on, apart from its text.
    """

    def __init__(
        self,
        cache: PagedCache,
        *,
        mask_id: int | None = None,
        is_paired: bool = False,
        blank_states: Callable[[int], PageStates] | None = None,
        store: PrefixStore | None = None,
        identity: str = "",
    ) -> None:
        self.cache = cache
        self.mask_id = mask_id
        self.is_paired, self.blank_states = is_paired, blank_states
        self.store = store
        self.salt = os.urandom(16) if store is None else store.derive_salt(identity)
        self.stats = PrefixStats()

    def count_cached(self, table: PageTable, start: int, text: Sequence[int]) -> int:
        """Return how many slots from `start` on with this text are in the cache, or now read."""
        names = self.find_names(table, start, text, load=True)
        return (len(table.page_names) + len(names)) * PAGE_SIZE - start

    def count_held(self, text: Sequence[int], adapter: str | None) -> int:
        """Return how many pages with the beginning of a text other tables hold."""
        names = self.find_names(PageTable(size=0, adapter=adapter), 0, text)
        pages = (self.cache.pages_by_name[name] for name in names)
        return sum(page not in self.cache.free for page in pages)

    def find_names(
        self, table: PageTable, start: int, text: Sequence[int], *, load: bool = False
    ) -> list[bytes]:
        """Return the names of cached pages with this text, from the first partial page on.

        With `load`, pages that have left memory are read where pages are free.
        """
        if start != len(table.cached_text):
            return []
        text = [*table.cached_text[len(table.page_names) * PAGE_SIZE :], *text]
        parent, names = table.preceding_names, list[bytes]()
        for begin in range(0, len(text) - PAGE_SIZE + 1, PAGE_SIZE):
            if (page := page_dependencies(text, begin)) is None:
                break
            parent = [self.hash_page(parent, page)]
            is_cached = parent[0] in self.cache.pages_by_name
            if not (is_cached or load and self.load_page(parent[0], names)):
                break
            names += parent
        return names

    def reuse_rows(self, table: PageTable, start: int, text: Sequence[int], rows: int) -> int:
        """Attach cached pages; return how many of the first `rows` rows need not run.

        Raises:
            CacheFullError: no page is free for a copy of the last one, which has rows to run.
        """
        names, first = self.find_names(table, start, text, load=True), len(table.page_names)
        end = min((first + len(names)) * PAGE_SIZE, start + rows)
        if self.blank_states is not None:
            table.known_end = (first + len(names)) * PAGE_SIZE
            names = names[: max(end // PAGE_SIZE - first, 0)]
            self.load_states(self.blank_states, names, first)
            names = self.trim_stateless(names)
            end = (first + len(names)) * PAGE_SIZE
        if not names or end <= start:
            return 0
        if self.blank_states is not None:
            states = self.cache.states_by_name[names[-1]]
            self.cache.keep_states(names[-1], states)
            table.states = {layer: (state,) for layer, state in states.items()}
        pages = [self.cache.pages_by_name[name] for name in names]
        self.cache.attach(table, first, pages[: end // PAGE_SIZE - first])
        if end % PAGE_SIZE:
            self.copy_into(table, pages[end // PAGE_SIZE - first], end)
        table.cached_text += text[: end - start]
        table.page_names += names[: end // PAGE_SIZE - first]
        table.written = max(table.written, end)
        self.stats = PrefixStats(self.stats.hits + 1, self.stats.slots + end - start)
        return end - start

    def load_page(self, name: bytes, found: Sequence[bytes]) -> bool:
        """Read a page from the store into a free one that has none of the `found` names."""
        page = None if self.store is None else self.cache.find_replaceable(found)
        if self.store is None or page is None:
            return False
        views = self.cache.views(page)
        if (content := self.store.read(page_file(name), views)) is None:
            return False
        self.cache.forget_page(page)
        fill_tensors(views, content)
        self.cache.name_page(page, name)
        self.cache.free.move_to_end(page)
        return True

    def load_states(
        self, blank_states: Callable[[int], PageStates], names: Sequence[bytes], first: int
    ) -> None:
        """Read the last states at the ends of pages from page `first` on that memory has not."""
        if self.store is None:
            return
        for index, name in reversed([*enumerate(names, first + 1)]):
            if name in self.cache.states_by_name:
                return
            states = blank_states(index * PAGE_SIZE)
            tensors = state_tensors(states)
            if (content := self.store.read(states_file(name), tensors)) is not None:
                fill_tensors(tensors, content)
                self.cache.keep_states(name, states)
                return

    def keep_pages(self, table: PageTable) -> None:
        """Keep the named pages of a released table in the store, if there is one."""
        if self.store is not None and table.page_names:
            self.store.submit(self.cache, table.page_names)

    def trim_stateless(self, names: list[bytes]) -> list[bytes]:
        """Return the names up to the last page with recurrent states."""
        found = (n for n, name in enumerate(names, 1) if name in self.cache.states_by_name)
        return names[: max(found, default=0)]

    def copy_into(self, table: PageTable, source: int, end: int) -> None:
        """Copy a page into the page of a table that ends after slot `end`, which is written."""
        if source in self.cache.free:
            self.cache.free.move_to_end(source)  # another page is taken, if there is one
        self.cache.prepare_pages(table, end // PAGE_SIZE, end)
        if (target := table.pages[end // PAGE_SIZE]) != source:
            self.cache.copy_pages([source], [target])

    def prepare_write(
        self, table: PageTable, start: int, end: int, text: Sequence[int] = ()
    ) -> None:
        """Drop the records of slots that are about to be written, and take pages for them.

        Slots whose recorded content already equals `text` keep it.

        Raises:
            CacheFullError: no page is free.
        """
        matches = [old == new for old, new in zip(table.cached_text[start:], text, strict=False)]
        start += [*matches, False].index(False)
        if start < len(table.cached_text):
            valid = start
            while valid and valid + (table.cached_text[valid - 1] >> TOKEN_BITS) > start:
                valid -= 1  # its row sees a slot that changes
            del table.page_names[valid // PAGE_SIZE :], table.cached_text[valid:]
        if start < end:
            self.cache.prepare_pages(table, start // PAGE_SIZE, end)

    def register_text(self, table: PageTable, start: int, text: Sequence[int]) -> None:
        """Record that `text` was written from slot `start` on, and name the pages it filled."""
        if start > len(table.cached_text):
            return
        table.cached_text += text[len(table.cached_text) - start :]
        for index in range(len(table.page_names), len(table.cached_text) // PAGE_SIZE):
            if (page := page_dependencies(table.cached_text, index * PAGE_SIZE)) is None:
                break
            name = self.hash_page(table.preceding_names, page)
            table.page_names.append(name)
            self.cache.name_page(table.pages[index], name)
        for slot, states in table.page_states.items():
            if slot <= len(table.page_names) * PAGE_SIZE:
                self.cache.keep_states(table.page_names[slot // PAGE_SIZE - 1], states)
        table.page_states.clear()

    @staticmethod
    def trim_computed(forward: ScheduledForward) -> ScheduledForward:
        """Return a draft's forward without the features or context that it has cached."""
        if forward.first_slot >= forward.table.skipped_slots:
            return forward
        if forward.features is not None:
            return forward.split_at(forward.table.skipped_slots - forward.start)[1]
        if forward.context is None:
            return forward
        return replace(
            forward, context=forward.context[forward.table.skipped_slots - forward.first_slot :]
        )

    def cacheable_text(self, forward: ScheduledForward) -> list[int]:
        """Return the text of the leading rows that can be cached.

        Rows count up to the first mask and the first position that differs from its slot. A block
        counts only as a whole.
        """
        blocks = forward.pattern if isinstance(forward.pattern, tuple) else ()
        ids = list(forward.ids) if blocks or forward.pattern == CAUSAL else []
        if isinstance(forward.pattern, Tree):
            causal = forward.pattern.root_slot + (forward.pattern.ancestor_masks[0] == 0)
            ids = list(forward.ids[: max(causal - forward.start, 0)])
        if self.is_paired:
            ids = []
        if forward.positions is not None:
            start, positions = forward.start, enumerate(forward.positions)
            del ids[next((i for i, place in positions if place != start + i), len(ids)) :]
        if self.mask_id in ids:
            del ids[ids.index(self.mask_id) :]
        if not blocks or not ids:
            return ids
        stops = forward.visible_ends()
        size = max(end for end in accumulate(blocks, initial=0) if end <= len(ids))
        if size and stops[size - 1] > forward.start + size:
            size -= blocks[-1]  # the last block sees slots after it
        rows = enumerate(zip(ids[:size], stops, strict=False), forward.start + 1)
        return [token + (stop - next_slot << TOKEN_BITS) for next_slot, (token, stop) in rows]

    def hash_page(self, before: list[bytes], tokens: Sequence[int]) -> bytes:
        """Return the name of a page with these tokens after the named pages."""
        parent = before[-1] if before else b""
        return blake2b(parent + str(list(tokens)).encode(), key=self.salt, digest_size=16).digest()


def page_dependencies(text: Sequence[int], begin: int) -> Sequence[int] | None:
    """Return the text from `begin` on that a page's keys depend on; None if incomplete."""
    end = begin + PAGE_SIZE
    end += text[end - 1] >> TOKEN_BITS
    return text[begin:end] if end <= len(text) else None


def token_pairs(text: Sequence[int]) -> list[int]:
    """Return each token with the next one, as an EAGLE draft stores them per slot."""
    return [token << 32 | following for token, following in pairwise(text)]
