"""Progress of loading a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LoadProgress = Callable[[int, int], None]
"""Receives the bytes that are done and their total."""


def ignore_progress(done: int, total: int) -> None:
    """Discard progress."""


LOAD_PROGRESS: ContextVar[LoadProgress] = ContextVar("LOAD_PROGRESS", default=ignore_progress)


@contextmanager
def report_load_progress(progress: LoadProgress) -> Iterator[None]:
    """Report the bytes read by every load of this thread to `progress` within the block."""
    before = LOAD_PROGRESS.set(progress)
    try:
        yield
    finally:
        LOAD_PROGRESS.reset(before)
