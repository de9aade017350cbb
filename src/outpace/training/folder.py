"""The folder of a run: locking, and atomic writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from outpace.lock import lock_file

LOCK_FILE = ".lock"


@contextmanager
def raise_write_errors(path: Path) -> Iterator[None]:
    """Convert errors of writing a file or folder to `ValueError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} cannot be written ({error}); free disk space or fix the cause, and run the "
            "same command to resume"
        ) from error


@contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Lock a folder against other trainers; the lock is released when the process dies.

    Raises:
        ValueError: another process holds the lock, or the folder cannot be written.
    """
    with raise_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK_FILE).open("w")
    with lock:
        try:
            lock_file(lock)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is training in {out}; wait for it, or give another out"
            ) from error
        yield


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content atomically; on failure the old content remains."""
    partial = path.with_name(f".{path.name}")
    with raise_write_errors(path):
        partial.write_text(text)
        os.replace(partial, path)
