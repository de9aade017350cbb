"""Progress of loading a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[int, int], None]
"""Receives the bytes that are done and their total."""


def ignore(done: int, total: int) -> None:
    """Discard progress."""


TOLD: ContextVar[Progress] = ContextVar("TOLD", default=ignore)


@contextmanager
def told(progress: Progress) -> Iterator[None]:
    """Report the bytes read by every load of this thread to `progress` within the block."""
    before = TOLD.set(progress)
    try:
        yield
    finally:
        TOLD.reset(before)
