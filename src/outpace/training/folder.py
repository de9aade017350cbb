"""The folder of a run: for one trainer at a time, and written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from outpace.lock import lock_file

LOCK = ".lock"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `ValueError` where a file or folder cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} cannot be written ({error}); make room or mend that, and go on with the same "
            "command"
        ) from error


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep every other trainer out of a folder; the system lets it go when the process dies."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK).open("w")
    with lock:
        try:
            lock_file(lock)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is training in {out}; wait for it, or give another out"
            ) from error
        yield


def write_whole(path: Path, text: str) -> None:
    """Put a text in the place of a file's content, which stays where that cannot be written."""
    partial = path.with_name(f".{path.name}")
    with writing(path):
        partial.write_text(text)
        os.replace(partial, path)
