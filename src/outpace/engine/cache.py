"""Paged key/value cache of one model, and the page table of each sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.errors import OptionError
from outpace.methods.method import check_type
from outpace.models.config import ModelConfig

PAGE = 16
"""Slots of a page."""

GRID = 16
"""Sequences start at multiples of this many pages where possible, so short ones align."""


@dataclass(slots=True, kw_only=True)
class Table:
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
    """

    pages: list[int]
    size: int
    slots: NDArray[np.int64] = field(init=False)
    first: int | None = field(init=False)
    stride: int = field(init=False)
    written: int = 0
    spared: int = 0
    known: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lay_out()

    def lay_out(self) -> None:
        """Compute the physical slots of the pages."""
        begin, count = self.pages[0], len(self.pages)
        if self.pages == list(range(begin, begin + count)):
            self.first = begin * PAGE
            self.slots = np.arange(self.first, self.first + self.size)
            self.stride = PAGE * next((n for n in alignments(count) if begin % n == 0), 0)
        else:
            pages = np.array(self.pages)
            self.first, self.stride = None, 0
            self.slots = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()[: self.size]

    def window(self, end: int) -> slice | NDArray[np.int64]:
        """Return the physical slots below slot `end`; a slice, so a view, where contiguous."""
        if self.first is not None:
            return slice(self.first, self.first + end)
        return self.slots[:end]


class Cache:
    """Keys and values of one model, `[slots, kv_heads, head_dim]` per layer, in pages.

    A free page may keep a content name, under which it is found until its memory is needed. The
    least recently used pages are reused first. After all pages there are `scratch` slots, which are
    never allocated.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        spare: int = 0,
    ) -> None:
        self.num_pages, extra = -(-slots // PAGE), -(-spare // PAGE)
        extra_pages = range(self.num_pages, self.num_pages + extra)
        self.spare = Table(pages=list(extra_pages), size=spare) if extra else None
        shape = (
            2,
            config.layers,
            config.kv_heads,
            (self.num_pages + extra) * PAGE,
            config.head_dim,
        )
        # The slots of a head are contiguous, since attention reads them in order.
        self.memory = zeros(shape, dtype, device).transpose(2, 3)
        self.keys, self.values = (list(half) for half in self.memory)
        self.holders = np.zeros(self.num_pages, dtype=np.int64)
        """Number of tables that hold each page."""
        self.used = np.zeros(self.num_pages, dtype=np.int64)
        """Time of the last use of each named page; 0 for pages without a name."""
        self.clock = 0
        self.named: dict[bytes, int] = {}
        self.names: dict[int, bytes] = {}
        self.told: Callable[[Sequence[int], Sequence[int]], None] = ignore
        """Called with sources and targets before a copy, without sources before an erase."""

    def __len__(self) -> int:
        return self.num_pages * PAGE

    @property
    def held(self) -> int:
        """Number of pages that are in use."""
        return int(np.count_nonzero(self.holders))

    @property
    def free(self) -> NDArray[np.bool_]:
        """Mask of pages that no table holds."""
        return self.holders == 0

    def reserve(self, slots: int) -> Table | None:
        """Return a table of `slots` slots, contiguous if possible; None where memory is short."""
        pages = self.take(-(-slots // PAGE))
        return None if pages is None else Table(pages=pages, size=slots)

    def release(self, table: Table) -> None:
        """Free the pages of a table; their recorded content can still be found."""
        if table.names:
            for page, name in zip(table.pages, table.names, strict=False):
                self.name(page, name)
            self.touch(table.names)
        self.drop(table.pages)

    def take(self, count: int) -> list[int] | None:
        """Allocate `count` pages, contiguous if possible; return None where memory is short."""
        if (chosen := self.blank(count)) is None:
            free = np.flatnonzero(self.free)
            if len(free) < count:
                return None
            chosen = self.oldest(free, count)
        for page in chosen[self.used[chosen] > 0].tolist():
            self.forget(page)
        self.holders[chosen] += 1
        pages: list[int] = chosen.tolist()
        return pages

    def blank(self, count: int) -> NDArray[np.int64] | None:
        """Return contiguous pages without content, aligned to the grid if possible."""
        end, (grid, _) = 32 * count, alignments(count)  # nearly always enough to find some
        while True:
            blank = np.flatnonzero((self.holders[:end] == 0) & (self.used[:end] == 0))
            starts = runs(blank, count)
            if len(aligned := starts[blank[starts] % grid == 0]):
                return blank[aligned[0] :][:count]
            if end >= self.num_pages:
                return blank[starts[0] :][:count] if len(starts) else None
            end *= 4

    def oldest(self, free: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the least recently used of these pages, contiguous if possible."""
        used, starts = self.used[free], runs(free, count)
        if not len(starts):
            return np.sort(free[np.argsort(used, kind="stable")[:count]])
        latest = np.lib.stride_tricks.sliding_window_view(used, count).max(1)[starts]
        return free[starts[latest.argmin()] :][:count]

    def scrub(self, table: Table) -> None:
        """Erase the pages that only this table holds, since they may contain NaNs."""
        exclusive = [page for page in table.pages if self.holders[page] == 1]
        for page in exclusive:
            self.forget(page)
        table.known.clear()
        table.names.clear()
        self.told([], exclusive)
        self.erase(exclusive)

    def recount(self, tables: Iterable[Table]) -> None:
        """Rebuild the reference counts from these tables."""
        self.holders[:] = 0
        for table in tables:
            table.lay_out()  # an interrupt may have left old slots
            self.hold(table.pages)

    def hold(self, pages: Sequence[int]) -> None:
        """Add one reference to each of these pages."""
        self.holders[pages] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Remove one reference from each of these pages."""
        self.holders[pages] -= 1

    def name(self, page: int, name: bytes) -> None:
        """Register a page under the name of its content, unless another page has it."""
        if name not in self.named:
            self.named[name], self.names[page] = page, name

    def forget(self, page: int) -> None:
        """Drop the name of a page that is about to change."""
        if page in self.names:
            del self.named[self.names.pop(page)]
            self.used[page] = 0

    def touch(self, names: Sequence[bytes]) -> None:
        """Record the use of named pages; the first ranks highest, since it leads to the others."""
        pages = [self.named[name] for name in names]
        self.used[pages] = self.clock + np.arange(len(pages), 0, -1)
        self.clock += len(pages)

    def copy(self, sources: Sequence[int], pages: Sequence[int]) -> None:
        """Copy pages to other pages."""
        self.told(sources, pages)
        paged = self.memory.unflatten(2, (self.num_pages, PAGE))
        paged[:, :, pages] = paged[:, :, sources]

    def erase(self, pages: Sequence[int]) -> None:
        """Write zeros into pages."""
        self.memory.unflatten(2, (self.num_pages, PAGE))[:, :, pages] = 0


def ignore(sources: Sequence[int], pages: Sequence[int]) -> None:
    """Do nothing: no other process mirrors these pages."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeroed memory: attention may read unwritten slots, at weight zero."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        # PyTorch would write all of it; the operating system maps zeroed pages on first use.
        blank = np.zeros(size, dtype=np.uint8)
    except (MemoryError, OverflowError, ValueError) as error:
        message = (
            f"no memory for {size / 2**30:.3g} GiB of keys and values: give a smaller cache_gib"
        )
        raise OptionError("cache_gib", size / 2**30, f"cache_gib: {message}") from error
    return torch.from_numpy(blank).view(dtype).view(shape)


def runs(pages: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return where `count` contiguous pages begin in a sorted list; aligned, if any are."""
    first = pages[: max(len(pages) - count + 1, 0)]
    starts = np.flatnonzero(pages[count - 1 :] - first == count - 1)
    aligned = starts[pages[starts] % alignments(count)[1] == 0]
    return aligned if len(aligned) else starts


def alignments(count: int) -> tuple[int, int]:
    """Return the preferred alignments of `count` pages: the grid's, and a power of two."""
    power = 1 << (count - 1).bit_length()
    return max(GRID, power), power


def cache_slots(config: ModelConfig, dtype: torch.dtype, budget: int) -> int:
    """Return the number of slots that fit into `budget` bytes.

    Raises:
        ValueError: not a single slot fits.
    """
    slot = 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize
    if budget < slot:
        raise OptionError(
            "cache_gib",
            budget / 2**30,
            f"cache_gib: {budget} bytes are less than the {slot} of one token's keys and values: "
            "give a larger cache_gib",
        )
    return budget // slot


def check_gib(gib: float | None) -> None:
    """Raise `ValueError` for an invalid cache size."""
    check_type("cache_gib", gib, float | None)
    if gib is not None and not 0 < gib < float("inf"):
        raise OptionError("cache_gib", gib, f"cache_gib must be a positive number, got {gib}")


def cache_bytes(gib: float | None, device: torch.device) -> int:
    """Return the bytes of a model's cache: `gib`, or half of a GPU's free memory, or 2 GiB."""
    if gib is not None:
        return int(gib * 2**30)
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2 * 2**30
