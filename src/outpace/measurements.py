"""Measurements of this machine in a file of the user's cache folder, for later processes."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from outpace.lock import lock_file

LOG = logging.getLogger(__name__)

MAX_BYTES = 2**20
"""Most bytes of the file; the oldest entries are dropped, and a larger file is ignored."""

CPU_FIELDS = "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features"
"""Fields of Linux that distinguish processors, with x86 and Arm."""

NETWORK_TYPES = {
    *("afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "gpfs"),
    *("lustre", "nfs", "nfs4", "smb3", "smbfs"),
}
"""File systems of other machines, whose measurements would be mixed with those of this one."""


def user_cache() -> Path:
    """Return the folder of this user's files that can be made or downloaded again."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or "~/.cache"
    return Path(os.path.expanduser(folder)) / "outpace"


class MeasurementFile:
    """Named measurements, as JSON.

    A file that is broken, not writable or on another machine is ignored with one line of the log:
    the measurements are then taken again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_user(cls) -> MeasurementFile:
        """Return the file of the user and this machine."""
        return cls(user_cache() / "measurements.json")

    def read_entry(self, name: str) -> Any:
        """Return an entry of this machine, unchecked, or None."""
        return self.read_entries().get(machine_name() + name)

    def read_entries(self) -> dict[str, Any]:
        """Return all entries; none if the file cannot be used."""
        try:
            check_place(self.path)
            with self.path.open("rb") as file:
                text = file.read(MAX_BYTES + 1)
            if len(text) > MAX_BYTES:
                raise ValueError(f"it is larger than {MAX_BYTES} bytes")
            entries = json.loads(text)
            if not isinstance(entries, dict):
                raise ValueError("it is not a JSON object")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RuntimeError) as error:
            LOG.debug("measurements in %s are ignored: %s", self.path, error)
            return {}
        return entries

    def write_entries(self, entries: Mapping[str, Any]) -> None:
        """Add or replace entries of this machine, unless another process is writing."""
        machine = machine_name()
        new = {machine + name: value for name, value in entries.items()}
        try:
            check_place(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.with_suffix(".lock").open("a") as lock:
                lock_file(lock)
                kept = {k: value for k, value in self.read_entries().items() if k not in new}
                temporary = self.path.with_suffix(".new")
                temporary.write_bytes(encode_bounded(kept | new))
                temporary.replace(self.path)
        except (OSError, ValueError, RuntimeError) as error:
            LOG.debug("measurements are not kept in %s: %s", self.path, error)


def encode_bounded(entries: dict[str, Any]) -> bytes:
    """Return entries as JSON, without the oldest ones where all exceed `MAX_BYTES`."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in entries.items()]
    size, first = 4, len(lines)
    while first and (size := size + len(lines[first - 1]) + 2) <= MAX_BYTES:
        first -= 1
    return ("{\n" + ",\n".join(lines[first:]) + "\n}").encode()


def check_place(path: Path) -> None:
    """Raise `OSError` for a path that is relative, or on another machine as far as is known."""
    if not path.is_absolute():
        raise OSError("its folder is relative")
    if str(path).startswith(("\\\\", "//")):  # a share of Windows
        raise OSError("it is on another machine")
    mounts = Path("/proc/self/mounts")
    if not mounts.is_file():
        return
    fields = (line.split() for line in mounts.read_text(errors="replace").splitlines())
    kinds = {place.replace("\\040", " "): kind for _, place, kind, *_ in fields}
    path = path.resolve()
    if next((kinds[str(p)] for p in path.parents if str(p) in kinds), "") in NETWORK_TYPES:
        raise OSError("it is on another machine")


@cache
def machine_name() -> str:
    """Return the first part of the name of each entry: processor and cores."""
    # Virtual machines give different processors one model name.
    fields = read_cpu_fields()
    details = sha256(repr([fields.get(name) for name in CPU_FIELDS]).encode()).hexdigest()[:8]
    return f"{cpu_model()}, {details}, {os.cpu_count()} cores: "


def cpu_model() -> str:
    """Return the model name of the CPU."""
    return read_cpu_fields().get("model name") or platform.processor() or platform.machine()


def read_cpu_fields() -> dict[str, str]:
    """Return what Linux lists of the first CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return {}
    first = cpuinfo.read_text().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
