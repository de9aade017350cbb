"""How far the loading of a model has come, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[int, int], None]
"""Called with how much is done, and of how much."""


def ignore(done: int, total: int) -> None:
    """Where nobody looks."""


TOLD: ContextVar[Progress] = ContextVar("TOLD", default=ignore)


@contextmanager
def told(progress: Progress) -> Iterator[None]:
    """Meanwhile whatever is loaded in this thread says how many bytes of its files are read."""
    before = TOLD.set(progress)
    try:
        yield
    finally:
        TOLD.reset(before)
