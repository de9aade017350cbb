"""The folder of a run, and experiment trackers for its metrics, through Accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
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
    """Lock a folder against other trainers; the lock is released when the process dies."""
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


TRACKERS = ("tensorboard", "trackio", "wandb")
PROJECT = "outpace"


def check_tracker(name: str | None) -> None:
    """Raise `ValueError` for a tracker that is unknown or not installed."""
    if name is None:
        return
    if name not in TRACKERS:
        raise ValueError(f"tracker {name!r} is unknown; choose {', '.join(TRACKERS)}")
    if name not in {str(each) for each in get_available_trackers()}:
        raise ValueError(f"tracker {name!r} is not installed: pip install {name}")


def start_tracker(
    accelerator: Accelerator, out: Path, settings: Mapping[str, Any], step: int
) -> None:
    """Start or, after a step, resume a run of the accelerator's tracker."""
    options = {
        # Points of repeated steps are dropped.
        "tensorboard": {"purge_step": step + 1},
        "wandb": {"name": out.name, "dir": str(out)},
        "trackio": {"name": out.name},
    }
    values = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in flatten_settings(settings).items()
    }
    with raise_write_errors(out):
        accelerator.init_trackers(PROJECT, config=values, init_kwargs=options)


def flatten_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        found |= flatten_settings(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found
