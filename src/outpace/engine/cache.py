"""Paged key/value cache of one model, and the page table of each sequence."""

from __future__ import annotations

import math
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.attention.cached import stored_size
from outpace.engine.memory import usable_bytes
from outpace.errors import OptionError
from outpace.field_types import CacheSize, check_value
from outpace.kernels.gated_delta import DeltaState
from outpace.models.config import ModelConfig
from outpace.models.device import DTYPES, parse_dtype


def allocate_layers(
    config: ModelConfig, slots: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return zeroed memory, and the keys and values of each layer in it.

    Layers of one shape share a tensor `[2, layers, slots, kv_heads, head_dim]`; keys and values
    are `[slots, kv_heads, head_dim]`. In int8, a head has its scale after its numbers.
    """
    shapes = config.kv_shapes
    memories: list[Tensor] = []
    layers: dict[tuple[int, int], Iterator[tuple[Tensor, Tensor]]] = {}
    for heads, size in dict.fromkeys(shapes):
        # The slots of a head are contiguous, since attention reads them in order.
        shape = 2, shapes.count((heads, size)), heads, slots, stored_size(size, dtype)
        memories.append(zero_memory(shape, dtype, device).transpose(2, 3))
        keys, values = memories[-1]
        layers[heads, size] = zip(keys, values, strict=True)
    keys_values = [next(layers[shape]) for shape in shapes]
    return memories, [keys for keys, _ in keys_values], [values for _, values in keys_values]


def zero_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeroed memory: attention may read unwritten slots, at weight zero."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        # PyTorch would write all of it; the operating system maps zeroed pages on first use. NumPy
        # would ask for pages of 2 MiB: one for each layer and head, at the first token.
        blank = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)
    except (OSError, OverflowError, ValueError) as error:
        raise OptionError(
            "cache_gib",
            size / 2**30,
            f"no memory for {size / 2**30:.3g} GiB of keys and values: lower it",
        ) from error
    return torch.frombuffer(blank, dtype=dtype).view(shape)


PAGE_SIZE = 16
"""Slots of a page."""

PageStates = dict[int, DeltaState]
"""Recurrent states at the end of a page, by layer."""

SLOTS_OF_PAGE = np.arange(PAGE_SIZE)


class CacheFullError(ValueError):
    """No page of a cache is free."""


@dataclass(slots=True, kw_only=True)
class PageTable:
    """Pages of one sequence in one cache, which are taken as they are written.

    Attributes:
        pages: physical pages, in the order of the slots they hold.
        size: number of slots that the sequence may use.
        slots: `i64[…]` physical slot of each slot that has a page.
        reserved: number of pages that it can always have; further ones may be short.
        written: number of slots that have ever been written.
        skipped_slots: number of slots taken from the prefix cache, whose features were not
            computed.
        cached_text: text of the first slots, as the prefix cache records it.
        page_names: content names of the pages that are full of this text.
        states: recurrent states of each gated delta layer, in order, if the model has any.
        page_states: states at page ends that the last pass copied, by slot and layer.
        known_end: end of the cached pages with its text, of which states may be missing.
        adapter: adapter of the model, or of a draft's target, that its keys depend on.
    """

    pages: list[int] = field(default_factory=list)
    size: int
    slots: NDArray[np.int64] = field(init=False)
    reserved: int = 0
    written: int = 0
    skipped_slots: int = 0
    cached_text: list[int] = field(default_factory=list)
    page_names: list[bytes] = field(default_factory=list)
    states: dict[int, tuple[DeltaState, ...]] = field(default_factory=dict)
    page_states: dict[int, PageStates] = field(default_factory=dict)
    known_end: int = 0
    adapter: str | None = None

    def __post_init__(self) -> None:
        self.slots = np.full(count_pages(self.size) * PAGE_SIZE, -1)
        self.locate_slots()

    @property
    def promised(self) -> int:
        """Number of pages that it can still take for certain."""
        return max(self.reserved - len(self.pages), 0)

    @property
    def preceding_names(self) -> list[bytes]:
        """Names of the pages before the next one; those of an adapter follow its own name."""
        return self.page_names or [(self.adapter or "").encode()]

    def place_pages(self, first: int, pages: Sequence[int]) -> None:
        """Set the pages from page `first` on."""
        self.pages[first : first + len(pages)] = pages
        self.locate_slots(first)

    def locate_slots(self, first: int = 0) -> None:
        """Compute the physical slots of the pages from page `first` on."""
        begins = np.array(self.pages[first:], dtype=np.int64) * PAGE_SIZE
        slots = self.slots[first * PAGE_SIZE : len(self.pages) * PAGE_SIZE]
        slots.reshape(-1, PAGE_SIZE)[:] = begins[:, None] + SLOTS_OF_PAGE


def count_pages(slots: int) -> int:
    """Return the number of pages that hold some slots."""
    return -(-slots // PAGE_SIZE)


class PagedCache:
    """Keys and values of one model, `[slots, kv_heads, head_dim]` per attention layer, in pages.

    Layers of one shape share a tensor of `memories`, `[2, layers, slots, kv_heads, head_dim]`.

    A free page may keep a content name, under which it is found until its memory is needed. The
    least recently used pages are reused first. After all pages there are `scratch` slots, which are
    never allocated. There are at most `sequences` tables at a time, if it is given. Named pages
    may have recurrent states, at most as many as further sequences could have. The least recently
    used are dropped first.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        scratch: int = 0,
        sequences: int | None = None,
    ) -> None:
        self.num_pages, extra = count_pages(slots), count_pages(scratch)
        extra_pages = range(self.num_pages, self.num_pages + extra)
        self.scratch = PageTable(pages=list(extra_pages), size=scratch) if extra else None
        self.memories, self.keys, self.values = allocate_layers(
            config, (self.num_pages + extra) * PAGE_SIZE, dtype, device
        )
        self.max_tables, self.num_tables = sequences, 0
        self.reference_counts = [0] * self.num_pages
        """Number of tables that hold each page."""
        self.free = OrderedDict.fromkeys(range(self.num_pages))
        """Pages that no table holds: those without a name, then the least recently used first."""
        self.promised = 0
        """Number of free pages that tables can still take for certain."""
        self.pages_by_name: dict[bytes, int] = {}
        self.names_by_page: dict[int, bytes] = {}
        self.states_by_name: dict[bytes, PageStates] = {}
        """Recurrent states at the ends of named pages, the least recently used first."""
        self.on_write: Callable[[Sequence[int], Sequence[int]], None] = ignore_write
        """Called with sources and targets before a copy, without sources before an erase."""

    def __len__(self) -> int:
        return self.num_pages * PAGE_SIZE

    @property
    def held_pages(self) -> int:
        """Number of pages that are in use."""
        return self.num_pages - len(self.free)

    @property
    def available(self) -> int:
        """Number of free pages that are not promised."""
        return len(self.free) - self.promised

    def reserve(
        self, slots: int, adapter: str | None = None, *, pages: int | None = None
    ) -> PageTable | None:
        """Return a table of up to `slots` slots; None where too few pages are free.

        All its pages are promised, or the first `pages` of them.
        """
        pages = count_pages(slots) if pages is None else pages
        if self.num_tables == self.max_tables or pages > self.available:
            return None
        self.num_tables += 1
        self.promised += pages
        self.limit_states()
        return PageTable(size=slots, reserved=pages, adapter=adapter)

    def release(self, table: PageTable) -> None:
        """Free the pages of a table; their recorded content can still be found."""
        for page, name in zip(table.pages, table.page_names, strict=False):
            self.name_page(page, name)
        self.drop_references(table.pages)
        self.promised -= table.promised
        self.num_tables -= 1

    def prepare_pages(self, table: PageTable, first: int, end: int) -> None:
        """Make the pages from page `first` up to slot `end` those of this table alone, to write.

        Raises:
            CacheFullError: no page is free.
        """
        for index in range(first, min(count_pages(end), len(table.pages))):
            if self.reference_counts[table.pages[index]] > 1:
                self.copy_page(table, index)
            else:
                self.forget_page(table.pages[index])
        self.extend(table, end)

    def extend(self, table: PageTable, end: int) -> None:
        """Take pages up to slot `end`; raise `CacheFullError` where they are short."""
        if (count := count_pages(end) - len(table.pages)) > 0:
            self.use_promise(table, count, count)
            table.place_pages(len(table.pages), self.take_pages(count))

    def attach(self, table: PageTable, first: int, pages: Sequence[int]) -> None:
        """Make a table hold found pages from page `first` on, so that they are not evicted.

        Raises:
            CacheFullError: they are free, but promised to others.
        """
        replaced = table.pages[first : first + len(pages)]
        free = sum(page in self.free for page in pages)
        self.use_promise(table, len(pages) - len(replaced), free)
        for page in pages:
            self.free.pop(page, None)
            self.reference_counts[page] += 1
        table.place_pages(first, pages)
        self.drop_references(replaced)

    def copy_page(self, table: PageTable, index: int) -> None:
        """Replace a page of a table by a copy; raise `CacheFullError` where no page is free."""
        self.use_promise(table, 0, 1)
        page, copies = table.pages[index], self.take_pages(1)
        self.copy_pages([page], copies)
        table.place_pages(index, copies)
        self.drop_references([page])

    def use_promise(self, table: PageTable, added: int, free: int) -> None:
        """Account for `added` pages of a table, and `free` pages that are no longer free.

        Raises:
            CacheFullError: others need them.
        """
        promised = min(added, table.promised)
        if free - promised > self.available:
            raise CacheFullError(
                f"the cache has {self.available} free pages, but {free - promised} are needed: "
                "set a larger cache_gib, or switch prefix_cache off"
            )
        self.promised -= promised

    def take_pages(self, count: int) -> list[int]:
        """Take free pages, in order of their memory: a processor foresees the next bytes."""
        pages = sorted(self.free.popitem(last=False)[0] for _ in range(count))
        for page in pages:
            self.forget_page(page)
            self.reference_counts[page] = 1
        return pages

    def find_replaceable(self, names: Sequence[bytes]) -> int | None:
        """Return the free page that is overwritten next, apart from those of some names."""
        page = next(iter(self.free), None)
        if page is None or self.names_by_page.get(page) not in names:
            return page
        for each in reversed(names):
            if self.pages_by_name[each] in self.free:
                self.free.move_to_end(self.pages_by_name[each])
        page = next(iter(self.free))
        return None if self.names_by_page.get(page) in names else page

    def zero_pages(self, table: PageTable) -> None:
        """Erase the pages that only this table holds, since they may contain NaNs."""
        exclusive = [page for page in table.pages if self.reference_counts[page] == 1]
        for page in exclusive:
            self.forget_page(page)
        table.cached_text.clear()
        table.page_names.clear()
        self.on_write([], exclusive)
        self.erase_pages(exclusive)

    def recount_references(self, tables: Iterable[PageTable]) -> None:
        """Rebuild the reference counts and the free pages from these tables."""
        self.reference_counts = [0] * self.num_pages
        self.num_tables = self.promised = 0
        for table in tables:
            self.num_tables += 1
            self.promised += table.promised
            table.locate_slots()  # an interrupt may have left old slots
            for page in table.pages:
                self.reference_counts[page] += 1
        order = sorted(
            OrderedDict.fromkeys([*self.free, *range(self.num_pages)]),
            key=self.names_by_page.__contains__,
        )
        self.free = OrderedDict.fromkeys(page for page in order if not self.reference_counts[page])

    def drop_references(self, pages: Sequence[int]) -> None:
        """Free the pages that no other table holds; the first, which leads to others, goes last."""
        for page in reversed(pages):
            self.reference_counts[page] -= 1
            if not self.reference_counts[page]:
                self.free[page] = None
                if page not in self.names_by_page:
                    self.free.move_to_end(page, last=False)

    def name_page(self, page: int, name: bytes) -> None:
        """Register a page under the name of its content, unless another page has it."""
        if name not in self.pages_by_name:
            self.pages_by_name[name], self.names_by_page[page] = page, name

    def forget_page(self, page: int) -> None:
        """Drop the name of a page that is about to change."""
        if (name := self.names_by_page.get(page)) is not None:
            self.pages_by_name.pop(name, None)
            self.states_by_name.pop(name, None)
            del self.names_by_page[page]

    @property
    def has_state_room(self) -> bool:
        """Whether states of pages have room beside those of the tables."""
        return self.max_tables is None or self.num_tables < self.max_tables

    def keep_states(self, name: bytes, states: PageStates) -> None:
        """Keep the states at the end of a page as the latest ones, if it is named."""
        self.states_by_name.pop(name, None)
        if name in self.pages_by_name:
            self.states_by_name[name] = states
            self.limit_states()

    def limit_states(self) -> None:
        """Drop the least recently used states of pages that have no room beside the tables."""
        while self.max_tables is not None and self.states_by_name:
            if self.num_tables + len(self.states_by_name) <= self.max_tables:
                return
            del self.states_by_name[next(iter(self.states_by_name))]

    def copy_pages(self, sources: Sequence[int], pages: Sequence[int]) -> None:
        self.on_write(sources, pages)
        for paged in self.paged_memories:
            paged[:, :, pages] = paged[:, :, sources]

    def erase_pages(self, pages: Sequence[int]) -> None:
        for paged in self.paged_memories:
            paged[:, :, pages] = 0

    def copy_content(self, name: bytes) -> list[Tensor] | None:
        """Return copies of what the page of a name holds, in any thread; None if it is lost."""
        page = self.pages_by_name.get(name, -1)
        if (known := self.names_by_page.get(page)) != name:
            return None
        copies = [each.clone(memory_format=torch.contiguous_format) for each in self.views(page)]
        # A page loses its name before it is written, and a new name is another object.
        return copies if self.names_by_page.get(page) is known else None

    def views(self, page: int) -> list[Tensor]:
        """Return what a page holds, by tensor of `memories`."""
        return [paged[:, :, page] for paged in self.paged_memories]

    @property
    def paged_memories(self) -> list[Tensor]:
        """The tensors of `memories` with their slots by page."""
        return [memory.unflatten(2, (-1, PAGE_SIZE)) for memory in self.memories]


def ignore_write(sources: Sequence[int], pages: Sequence[int]) -> None:
    """Do nothing: no other process mirrors these pages."""


def cache_slots(config: ModelConfig, dtype: torch.dtype, budget: int) -> int:
    """Return the number of slots that fit into `budget` bytes.

    Raises:
        ValueError: not a single slot fits.
    """
    if budget < (slot := slot_bytes(config, dtype)):
        raise OptionError(
            "cache_gib",
            budget / 2**30,
            f"{budget} bytes hold less than one token of {slot}: enlarge it",
        )
    return budget // slot


def slot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of a token."""
    stored = sum(heads * stored_size(size, dtype) for heads, size in config.kv_shapes)
    return 2 * stored * dtype.itemsize


def context_bytes(config: ModelConfig, length: int, dtype: torch.dtype) -> int:
    """Return the bytes of a cache for a context; recurrent states take up to half of it."""
    return length * slot_bytes(config, dtype) * (1 if config.delta is None else 2)


CACHE_DTYPES = {**DTYPES, "int8": torch.int8}

USUAL_BYTES = 2 * 2**30
"""Least bytes of a cache by default, where memory allows: that many requests share it."""

MEMORY_PART = 4
"""Caches take at most this part of the memory by default."""


def resolve_cache(gib: float | None, dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Check the size and the dtype of a cache; return the dtype, None for that of the model."""
    check_value("cache_gib", gib, CacheSize | None)
    return None if dtype is None else parse_dtype("cache_dtype", dtype, CACHE_DTYPES)


def default_dtype(dtype: torch.dtype, *, quantized: bool) -> torch.dtype:
    """Return the usual dtype of the cache of a model that computes in `dtype`.

    Where its matrices are `quantized`, 16 bits are exact enough; float16 has more of them than
    bfloat16 after the point, and keys and values are far below its maximum.
    """
    return torch.float16 if dtype == torch.float32 and quantized else dtype


def cache_bytes(
    gib: float | None, device: torch.device, *, context: int = 0, share: float = 1.0
) -> int:
    """Return the bytes of a model's cache: `gib`, or half of a GPU's free memory, or for a CPU.

    There, it has room for `context` bytes and 2 GiB, within its share of a quarter of the memory.
    """
    if gib is not None:
        return int(gib * 2**30)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    if (memory := usable_bytes(device)) is None:
        return USUAL_BYTES
    return min(max(context, USUAL_BYTES), int(memory * share) // MEMORY_PART)


def check_memory(
    gib: float | None, max_length: int | None, slots: Sequence[int], device: torch.device
) -> None:
    """Raise `OptionError` where caches exceed all memory that this process may use.

    `slots` are the bytes of a token in each of them.
    """
    memory = usable_bytes(device)
    needed = sum(slots) * (max_length or 0) if gib is None else len(slots) * gib * 2**30
    if memory is not None and needed > memory:
        raise OptionError(
            "max_length" if gib is None else "cache_gib",
            max_length if gib is None else gib,
            f"{needed / 2**30:.4g} GiB of keys and values exceed the {memory / 2**30:.4g} GiB of "
            "memory that this process may use: lower it",
        )
