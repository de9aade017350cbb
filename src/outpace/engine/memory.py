"""Memory of this computer, and what of it this process may use."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

MEMORY_FILE = Path("/proc/meminfo")
GROUP_FILE, GROUP_FOLDER = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that another model may use on a device; None where they are not known.

    On a CPU they end at the limit of the container, if it has one.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    rest = (limit - group_usage(folder) for folder, limit in group_limits())
    return min([*system_bytes("MemAvailable"), *rest], default=None)


def usable_bytes(device: torch.device) -> int | None:
    """Return all bytes of a device that this process may use; None where they are not known.

    On a CPU they end at the limit of the container or of the address space, if there is one.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limits = [*system_bytes("MemTotal"), *(limit for _, limit in group_limits())]
    if sys.platform != "win32":
        import resource

        if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
            limits.append(limit)
    return min(limits, default=None)


def system_bytes(name: str) -> Iterator[int]:
    """Yield a number of the memory of this computer, if Linux reports it."""
    if MEMORY_FILE.is_file():
        lines = MEMORY_FILE.read_text().splitlines()
        yield from (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def group_limits() -> Iterator[tuple[Path, int]]:
    """Yield the folder and the limit of this process's control group, and of each parent."""
    if not GROUP_FILE.is_file():
        return
    for line in GROUP_FILE.read_text().splitlines():
        if line.startswith("0::"):  # version 2
            folder = GROUP_FOLDER / line[3:].lstrip("/")
            for each in (folder, *folder.parents):
                limit = each / "memory.max"
                if limit.is_file() and (text := limit.read_text().strip()).isdigit():
                    yield each, int(text)


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
