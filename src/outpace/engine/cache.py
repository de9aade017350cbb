"""The memory of one model: pages of key/value slots, and a table of them for each sequence."""

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

GRID = 16
"""Pages by whose multiples sequences begin where they can, so that short ones lie alike."""


@dataclass(slots=True, kw_only=True)
class Table:
    """The pages of one sequence in one cache.

    Attributes:
        pages: physical pages, in the order of the slots they hold.
        size: number of slots reserved.
        slots: `i64[size]` physical slot of each slot.
        first: the first of them, where the pages lie one behind the other.
        stride: slots by whose multiples contiguous pages begin, those of the grid if they do, so
            that neighbours lie alike; 0 where pages scatter.
        written: number of slots that have ever been written.
        spared: number of slots that were found filled from features that nobody has computed.
        known: tokens of the first slots, as far as these hold what a causal prefill writes there.
        names: content names of the pages that are full of them.
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
        """Find the physical slots of the pages."""
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
        """Physical slots below slot `end`; a slice, and so a view, where pages are contiguous."""
        if self.first is not None:
            return slice(self.first, self.first + end)
        return self.slots[:end]


class Cache:
    """Keys and values of one model, `[slots, kv_heads, head_dim]` per layer, handed out in pages.

    A page that nobody holds may keep a content name, under which it is found until its memory is
    wanted; those that have been of no use for longest go first. Behind all pages there are `spare`
    slots, which are handed out to nobody.
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
        self.num_pages, more = -(-slots // PAGE), -(-spare // PAGE)
        own = range(self.num_pages, self.num_pages + more)
        self.spare = Table(pages=list(own), size=spare) if more else None
        shape = (2, config.layers, config.kv_heads, (self.num_pages + more) * PAGE, config.head_dim)
        # The slots of a head lie side by side, since attention reads them one behind the other.
        self.memory = zeros(shape, dtype, device).transpose(2, 3)
        self.keys, self.values = (list(half) for half in self.memory)
        self.holders = np.zeros(self.num_pages, dtype=np.int64)
        """Tables that hold each page."""
        self.used = np.zeros(self.num_pages, dtype=np.int64)
        """When each named page was last of use; 0 for pages without a name."""
        self.clock = 0
        self.named: dict[bytes, int] = {}
        self.names: dict[int, bytes] = {}
        self.told: Callable[[Sequence[int], Sequence[int]], None] = ignore
        """Called before pages are written as others are, or erased: without those others."""

    def __len__(self) -> int:
        return self.num_pages * PAGE

    @property
    def held(self) -> int:
        """Number of pages that somebody holds."""
        return int(np.count_nonzero(self.holders))

    @property
    def free(self) -> NDArray[np.bool_]:
        """Pages that no table holds."""
        return self.holders == 0

    def reserve(self, slots: int) -> Table | None:
        """A table with room for `slots`, contiguous if possible; None where memory is short."""
        pages = self.take(-(-slots // PAGE))
        return None if pages is None else Table(pages=pages, size=slots)

    def release(self, table: Table) -> None:
        """Give the pages of a table back; what they are known to hold can still be found."""
        if table.names:
            for page, name in zip(table.pages, table.names, strict=False):
                self.name(page, name)
            self.touch(table.names)
        self.drop(table.pages)

    def take(self, count: int) -> list[int] | None:
        """Hold `count` pages, side by side if possible; None where memory is short."""
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
        """Neighbouring pages that hold nothing, on the grid or aligned if any are."""
        end, (grid, _) = 32 * count, alignments(count)  # nearly always enough to find some
        while True:
            blank = np.flatnonzero((self.holders[:end] == 0) & (self.used[:end] == 0))
            starts = runs(blank, count)
            if len(even := starts[blank[starts] % grid == 0]):
                return blank[even[0] :][:count]
            if end >= self.num_pages:
                return blank[starts[0] :][:count] if len(starts) else None
            end *= 4

    def oldest(self, free: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Of these pages, those that have been of no use for longest, side by side if possible."""
        used, starts = self.used[free], runs(free, count)
        if not len(starts):
            return np.sort(free[np.argsort(used, kind="stable")[:count]])
        latest = np.lib.stride_tricks.sliding_window_view(used, count).max(1)[starts]
        return free[starts[latest.argmin()] :][:count]

    def scrub(self, table: Table) -> None:
        """Erase what the pages of a table hold alone, since it may be no numbers."""
        own = [page for page in table.pages if self.holders[page] == 1]
        for page in own:
            self.forget(page)
        table.known.clear()
        table.names.clear()
        self.told([], own)
        self.erase(own)

    def recount(self, tables: Iterable[Table]) -> None:
        """Count the holders of all pages anew: these tables and no others."""
        self.holders[:] = 0
        for table in tables:
            table.lay_out()  # its pages may have changed a moment before
            self.hold(table.pages)

    def hold(self, pages: Sequence[int]) -> None:
        """Count one table more that holds these pages."""
        self.holders[pages] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Count one table less."""
        self.holders[pages] -= 1

    def name(self, page: int, name: bytes) -> None:
        """Let a page be found under what it holds, unless another one is already."""
        if name not in self.named:
            self.named[name], self.names[page] = page, name

    def forget(self, page: int) -> None:
        """Let a page no longer be found, since it is about to change."""
        if page in self.names:
            del self.named[self.names.pop(page)]
            self.used[page] = 0

    def touch(self, names: Sequence[bytes]) -> None:
        """Note that pages were of use: the first most, since the others are reached through it."""
        pages = [self.named[name] for name in names]
        self.used[pages] = self.clock + np.arange(len(pages), 0, -1)
        self.clock += len(pages)

    def copy(self, sources: Sequence[int], pages: Sequence[int]) -> None:
        """Write what is in some pages into others."""
        self.told(sources, pages)
        whole = self.memory.unflatten(2, (self.num_pages, PAGE))
        whole[:, :, pages] = whole[:, :, sources]

    def erase(self, pages: Sequence[int]) -> None:
        """Write zeros into pages."""
        self.memory.unflatten(2, (self.num_pages, PAGE))[:, :, pages] = 0


def ignore(sources: Sequence[int], pages: Sequence[int]) -> None:
    """Nobody else has the same pages."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory in which attention may look at slots that nobody has written, and not count them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        # PyTorch would write all of it; the system gives pages of zeros when they are first used.
        blank = np.zeros(size, dtype=np.uint8)
    except (MemoryError, OverflowError, ValueError) as error:
        message = (
            f"no memory for {size / 2**30:.3g} GiB of keys and values: give a smaller cache_gib"
        )
        raise OptionError("cache_gib", size / 2**30, f"cache_gib: {message}") from error
    return torch.from_numpy(blank).view(dtype).view(shape)


def runs(pages: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Where in these sorted pages `count` neighbours begin; aligned, if any are."""
    first = pages[: max(len(pages) - count + 1, 0)]
    found = np.flatnonzero(pages[count - 1 :] - first == count - 1)
    aligned = found[pages[found] % alignments(count)[1] == 0]
    return aligned if len(aligned) else found


def alignments(count: int) -> tuple[int, int]:
    """Where so many begin best: at multiples of the grid's, or else of the power of two above."""
    power = 1 << (count - 1).bit_length()
    return max(GRID, power), power


def cache_slots(config: ModelConfig, dtype: torch.dtype, budget: int) -> int:
    """Number of slots that fit into `budget` bytes; `ValueError` where not one does."""
    slot = 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize
    if budget < slot:
        raise OptionError(
            "cache_gib",
            budget / 2**30,
            f"cache_gib: {budget} bytes hold no keys and values, of which a token takes {slot}: "
            "give a larger cache_gib",
        )
    return budget // slot


def check_gib(gib: float | None) -> None:
    """Raise `ValueError` for what is no memory of a cache."""
    check_type("cache_gib", gib, float | None)
    if gib is not None and not 0 < gib < float("inf"):
        raise OptionError("cache_gib", gib, f"cache_gib must be a positive number, not {gib}")


def cache_bytes(gib: float | None, device: torch.device) -> int:
    """Memory for the cache of the next model, where nobody says how much: 2 GiB, or half of what
    is free on a GPU."""
    if gib is not None:
        return int(gib * 2**30)
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2 * 2**30
