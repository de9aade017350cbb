"""Folders that are written atomically."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows, where partial folders of killed processes are not removed
    fcntl = None  # type: ignore[assignment]


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes `folder` at the end and is removed on any error.

    Partial folders of killed processes are removed first.

    Raises:
        OSError: If it cannot be written.
    """
    home, name = folder.resolve().parent, folder.resolve().name
    home.mkdir(parents=True, exist_ok=True)
    for path in home.iterdir():
        if re.fullmatch(rf"\.{re.escape(name)}\.\d+\.partial", path.name):
            remove_abandoned(path)
    partial = home / f".{name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        with lock_partial_folder(partial):
            yield partial
            partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def lock_partial_folder(folder: Path) -> Iterator[None]:
    """Lock a folder; the operating system releases the lock when the process ends.

    Raises:
        BlockingIOError: If another process holds the lock.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path) -> None:
    """Remove a partial folder unless a process holds it, or locks are unavailable."""
    if fcntl is not None:
        with suppress(OSError), lock_partial_folder(folder):
            shutil.rmtree(folder)
