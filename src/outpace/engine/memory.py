"""Memory that is available for another model, and its release."""

from __future__ import annotations

import ctypes
import gc
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
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc keeps the memory of small tensors otherwise
        trim(0)
