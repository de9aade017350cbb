"""Output files of commands: checked before the work, replaced after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(path: Path | None) -> Iterator[Path | None]:
    """Yield a temporary file, which replaces `path` unless an exception is raised.

    Yields None if `path` is None.

    Raises:
        ValueError: Before the work, if the file cannot be written.
    """
    if path is None:
        yield None
        return
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file; give another output file")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{path} is not writable; give another output file")
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    new_folders = [folder for folder in path.parents if not folder.exists()]
    try:
        check_writable(draft, path)
        try:
            yield draft
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    finally:
        for folder in new_folders:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def check_writable(draft: Path, path: Path) -> None:
    """Create the folder, and raise `ValueError` if nothing can be written there."""
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.touch()
        draft.unlink()  # no file remains if a second Ctrl-C interrupts the clean-up
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror}; give another output file"
        ) from error
