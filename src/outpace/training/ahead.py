"""Prefetching: computes the data of the next step in a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """Calls a function of the step number one step ahead, in a separate thread.

    Its exceptions are raised when the result is requested.
    """

    def __init__(self, make: Callable[[int], Made]) -> None:
        self.make = make
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="outpace-data")
        self.begun: tuple[int, Future[Made]] | None = None

    def __call__(self, step: int, *, last: bool = False) -> Made:
        """Return the result of a step; unless it is the `last` one, start computing the next."""
        number, future = self.begun or (None, None)
        if future is None or number != step:
            future = self.pool.submit(self.make, step)
        result = future.result()
        self.begun = None if last else (step + 1, self.pool.submit(self.make, step + 1))
        return result

    def close(self) -> None:
        """Wait for the running computation, and stop the thread."""
        self.pool.shutdown(cancel_futures=True)
