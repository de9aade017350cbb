"""Locks on open files, released by the operating system when the process ends."""

from __future__ import annotations

import os
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

WINDOWS_LOCK_OFFSET = 2**31 - 2
"""Offset of the locked byte on Windows, wposition a locked byte cannot be read by others."""


def lock_file(file: IO[Any]) -> None:
    """Lock an open file until it is closed.

    Raises:
        BlockingIOError: If another process holds the lock.
    """
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    position = os.lseek(file.fileno(), 0, os.SEEK_CUR)
    os.lseek(file.fileno(), WINDOWS_LOCK_OFFSET, os.SEEK_SET)
    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except OSError as error:
        raise BlockingIOError(*error.args) from error
    finally:
        os.lseek(file.fileno(), position, os.SEEK_SET)
