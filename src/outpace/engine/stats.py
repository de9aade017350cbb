"""Statistics of an engine at one moment, and the memory of this computer."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from outpace.engine.engine import Engine
from outpace.engine.runner import CacheUsage


class Stats(NamedTuple):
    """Requests and memory of an engine.

    Attributes:
        waiting: requests without memory yet.
        running: requests with memory.
        models: pages of each model's cache.
    """

    waiting: int
    running: int
    models: tuple[CacheUsage, ...]

    @classmethod
    def from_engine(cls, engine: Engine) -> Stats:
        """Read the statistics of an engine, from any thread."""
        models = tuple(runner.cache_usage for runner in engine.runners)
        return cls(len(engine.queue), len(engine.running), models)

    @property
    def held_pages(self) -> int:
        """Pages that requests hold, in the caches of all models."""
        return sum(model.held_pages for model in self.models)

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests, and no memory of earlier ones is held."""
        return not (self.waiting or self.running or self.held_pages)


MEMORY_FILE = Path("/proc/meminfo")
GROUP_FILE, GROUP_FOLDER = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that another model may use on a device; None where they are not known.

    On a CPU they end at the limit of the container, if it has one.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([*system_bytes(), *group_bytes()], default=None)


def system_bytes() -> Iterator[int]:
    """Yield the available memory of this computer, if Linux reports it."""
    if MEMORY_FILE.is_file():
        lines = MEMORY_FILE.read_text().splitlines()
        yield from (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))


def group_bytes() -> Iterator[int]:
    """Yield the rest below the limit of this process's control group and of each parent."""
    if not GROUP_FILE.is_file():
        return
    for line in GROUP_FILE.read_text().splitlines():
        if line.startswith("0::"):  # version 2
            folder = GROUP_FOLDER / line[3:].lstrip("/")
            for each in (folder, *folder.parents):
                limit = each / "memory.max"
                if limit.is_file() and (text := limit.read_text().strip()).isdigit():
                    yield int(text) - group_usage(each)


def group_usage(folder: Path) -> int:
    """Return the bytes that a control group uses, without files that can be read again."""
    counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int((folder / "memory.current").read_text()) - int(counts["inactive_file"])


def release_memory() -> None:
    """Return the memory of objects that are no longer used to the system."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    """Return the memory that was freed to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc keeps the memory of small tensors otherwise
        trim(0)
