"""Files that a command writes: found wanting before its work, replaced when that is done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: Path | None) -> Iterator[Path | None]:
    """A file to write, which then takes the place of `path` unless something fails.

    Raises `ValueError` on the way in where no file can be written there. None for None.
    """
    if path is None:
        yield None
        return
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file to write to; name another")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{path} may not be written to; name another")
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        try_out(draft, path)
        try:
            yield draft
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    finally:
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def try_out(draft: Path, path: Path) -> None:
    """Raise `ValueError` where nothing can be written; the folder is there then."""
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.touch()
        draft.unlink()  # a second Ctrl-C, while the first one ends the work, finds nothing to leave
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}; name another") from error
