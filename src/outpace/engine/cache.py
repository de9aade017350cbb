"""Paged key/value cache of one model, and the page table of each sequence."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.errors import OptionError
from outpace.field_types import CacheSize, check_value
from outpace.kernels.gated_delta import DeltaState
from outpace.models.config import ModelConfig


def allocate_layers(
    config: ModelConfig, slots: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return zeroed memory, and the keys and values of each layer in it.

    Layers of one shape share a tensor `[2, layers, slots, kv_heads, head_dim]`; keys and values
    are `[slots, kv_heads, head_dim]`.
    """
    shapes = config.kv_shapes
    memories: list[Tensor] = []
    layers: dict[tuple[int, int], Iterator[tuple[Tensor, Tensor]]] = {}
    for heads, size in dict.fromkeys(shapes):
        # The slots of a head are contiguous, since attention reads them in order.
        shape = 2, shapes.count((heads, size)), heads, slots, size
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

PAGE_GRID = 16
"""Sequences start at multiples of this many pages where possible, so short ones align."""


@dataclass(slots=True, kw_only=True)
class PageTable:
    """Pages of one sequence in one cache.

    Attributes:
        pages: physical pages, in the order of the slots they hold.
        size: number of slots reserved.
        slots: `i64[size]` physical slot of each slot.
        first: physical slot of slot 0, where the pages are contiguous; else None.
        stride: alignment of contiguous pages in slots, preferably that of the grid; 0 where pages
            scatter.
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

    pages: list[int]
    size: int
    slots: NDArray[np.int64] = field(init=False)
    first: int | None = field(init=False)
    stride: int = field(init=False)
    written: int = 0
    skipped_slots: int = 0
    cached_text: list[int] = field(default_factory=list)
    page_names: list[bytes] = field(default_factory=list)
    states: dict[int, tuple[DeltaState, ...]] = field(default_factory=dict)
    page_states: dict[int, PageStates] = field(default_factory=dict)
    known_end: int = 0
    adapter: str | None = None

    def __post_init__(self) -> None:
        self.locate_slots()

    @property
    def preceding_names(self) -> list[bytes]:
        """Names of the pages before the next one; those of an adapter follow its own name."""
        return self.page_names or [(self.adapter or "").encode()]

    def locate_slots(self) -> None:
        """Compute the physical slots of the pages."""
        begin, count = self.pages[0], len(self.pages)
        if self.pages == list(range(begin, begin + count)):
            self.first = begin * PAGE_SIZE
            self.slots = np.arange(self.first, self.first + self.size)
            self.stride = PAGE_SIZE * next((n for n in page_alignments(count) if begin % n == 0), 0)
        else:
            pages = np.array(self.pages)
            self.first, self.stride = None, 0
            self.slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()[: self.size]

    def physical_slots(self, end: int) -> slice | NDArray[np.int64]:
        """Return the physical slots below slot `end`; a slice, so a view, where contiguous."""
        if self.first is not None:
            return slice(self.first, self.first + end)
        return self.slots[:end]


class PagedCache:
    """Keys and values of one model, `[slots, kv_heads, head_dim]` per attention layer, in pages.

    Layers of one shape share a tensor of `memories`, `[2, layers, slots, kv_heads, head_dim]`.

    A free page may keep a content name, under which it is found until its memory is needed. The
    least recently used pages are reused first. After all pages there are `scratch` slots, which are
    never allocated. At most `sequences` tables are reserved at a time, if it is given. Named pages
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
        self.num_pages, extra = -(-slots // PAGE_SIZE), -(-scratch // PAGE_SIZE)
        extra_pages = range(self.num_pages, self.num_pages + extra)
        self.scratch = PageTable(pages=list(extra_pages), size=scratch) if extra else None
        self.memories, self.keys, self.values = allocate_layers(
            config, (self.num_pages + extra) * PAGE_SIZE, dtype, device
        )
        self.max_tables, self.num_tables = sequences, 0
        self.reference_counts = np.zeros(self.num_pages, dtype=np.int64)
        """Number of tables that hold each page."""
        self.last_used = np.zeros(self.num_pages, dtype=np.int64)
        """Time of the last use of each named page; 0 for pages without a name."""
        self.clock = 0
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
        return int(np.count_nonzero(self.reference_counts))

    @property
    def free_pages(self) -> NDArray[np.bool_]:
        """Mask of pages that no table holds."""
        return self.reference_counts == 0

    def reserve(self, slots: int, adapter: str | None = None) -> PageTable | None:
        """Return a table of `slots` slots, contiguous if possible; None where memory is short."""
        if self.num_tables == self.max_tables:
            return None
        if (pages := self.take_pages(-(-slots // PAGE_SIZE))) is None:
            return None
        self.num_tables += 1
        self.limit_states()
        return PageTable(pages=pages, size=slots, adapter=adapter)

    def release(self, table: PageTable) -> None:
        """Free the pages of a table; their recorded content can still be found."""
        if table.page_names:
            for page, name in zip(table.pages, table.page_names, strict=False):
                self.name_page(page, name)
            self.touch_pages(table.page_names)
        self.drop_references(table.pages)
        self.num_tables -= 1

    def take_pages(self, count: int) -> list[int] | None:
        """Allocate `count` pages, contiguous if possible; return None where memory is short."""
        if (chosen := self.find_blank_pages(count)) is None:
            free = np.flatnonzero(self.free_pages)
            if len(free) < count:
                return None
            chosen = self.find_oldest_pages(free, count)
        for page in chosen[self.last_used[chosen] > 0].tolist():
            self.forget_page(page)
        self.reference_counts[chosen] += 1
        pages: list[int] = chosen.tolist()
        return pages

    def find_blank_pages(self, count: int) -> NDArray[np.int64] | None:
        """Return contiguous pages without content, aligned to the grid if possible."""
        end, (grid, _) = 32 * count, page_alignments(count)  # nearly always enough to find some
        while True:
            blank = np.flatnonzero((self.reference_counts[:end] == 0) & (self.last_used[:end] == 0))
            starts = contiguous_starts(blank, count)
            if len(aligned := starts[blank[starts] % grid == 0]):
                return blank[aligned[0] :][:count]
            if end >= self.num_pages:
                return blank[starts[0] :][:count] if len(starts) else None
            end *= 4

    def find_oldest_pages(self, free: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the least recently used of these pages, contiguous if possible."""
        used, starts = self.last_used[free], contiguous_starts(free, count)
        if not len(starts):
            return np.sort(free[np.argsort(used, kind="stable")[:count]])
        latest = np.lib.stride_tricks.sliding_window_view(used, count).max(1)[starts]
        return free[starts[latest.argmin()] :][:count]

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
        """Rebuild the reference counts from these tables."""
        self.reference_counts[:] = self.num_tables = 0
        for table in tables:
            self.num_tables += 1
            table.locate_slots()  # an interrupt may have left old slots
            self.add_references(table.pages)

    def add_references(self, pages: Sequence[int]) -> None:
        self.reference_counts[pages] += 1

    def drop_references(self, pages: Sequence[int]) -> None:
        self.reference_counts[pages] -= 1

    def name_page(self, page: int, name: bytes) -> None:
        """Register a page under the name of its content, unless another page has it."""
        if name not in self.pages_by_name:
            self.pages_by_name[name], self.names_by_page[page] = page, name

    def forget_page(self, page: int) -> None:
        """Drop the name of a page that is about to change."""
        if page in self.names_by_page:
            name = self.names_by_page.pop(page)
            del self.pages_by_name[name]
            self.states_by_name.pop(name, None)
            self.last_used[page] = 0

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

    def touch_pages(self, names: Sequence[bytes]) -> None:
        """Record the use of named pages; the first ranks highest, since it leads to the others."""
        pages = [self.pages_by_name[name] for name in names]
        self.last_used[pages] = self.clock + np.arange(len(pages), 0, -1)
        self.clock += len(pages)

    def copy_pages(self, sources: Sequence[int], pages: Sequence[int]) -> None:
        self.on_write(sources, pages)
        for paged in self.paged_memories:
            paged[:, :, pages] = paged[:, :, sources]

    def erase_pages(self, pages: Sequence[int]) -> None:
        for paged in self.paged_memories:
            paged[:, :, pages] = 0

    @property
    def paged_memories(self) -> list[Tensor]:
        """The tensors of `memories` with their slots by page."""
        return [memory.unflatten(2, (-1, PAGE_SIZE)) for memory in self.memories]


def ignore_write(sources: Sequence[int], pages: Sequence[int]) -> None:
    """Do nothing: no other process mirrors these pages."""


def contiguous_starts(pages: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return where `count` contiguous pages begin in a sorted list; aligned, if any are."""
    first = pages[: max(len(pages) - count + 1, 0)]
    starts = np.flatnonzero(pages[count - 1 :] - first == count - 1)
    aligned = starts[pages[starts] % page_alignments(count)[1] == 0]
    return aligned if len(aligned) else starts


def page_alignments(count: int) -> tuple[int, int]:
    """Return the preferred alignments of `count` pages: the grid's, and a power of two."""
    power = 1 << (count - 1).bit_length()
    return max(PAGE_GRID, power), power


def cache_slots(config: ModelConfig, dtype: torch.dtype, budget: int) -> int:
    """Return the number of slots that fit into `budget` bytes.

    Raises:
        ValueError: not a single slot fits.
    """
    slot = 2 * sum(heads * size for heads, size in config.kv_shapes) * dtype.itemsize
    if budget < slot:
        raise OptionError(
            "cache_gib",
            budget / 2**30,
            f"{budget} bytes hold less than one token of {slot}: enlarge it",
        )
    return budget // slot


def check_cache_gib(gib: float | None) -> None:
    """Raise `ValueError` for an invalid cache size."""
    check_value("cache_gib", gib, CacheSize | None)


def cache_bytes(gib: float | None, device: torch.device) -> int:
    """Return the byte count of a model's cache: `gib`, or half of a GPU's free memory, or 2 GiB."""
    if gib is not None:
        return int(gib * 2**30)
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2 * 2**30
