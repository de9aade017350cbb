"""Prefetching: computes the data of the next step in a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Prefetched = TypeVar("Prefetched")


class Prefetcher(Generic[Prefetched]):
    """Calls a function of the step number one step ahead, in a separate thread.

    Its exceptions are raised when the result is requested.
    """

    def __init__(self, make: Callable[[int], Prefetched]) -> None:
        self.compute = make
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="outpace-data")
        self.pending: tuple[int, Future[Prefetched]] | None = None

    def __call__(self, step: int, *, last: bool = False) -> Prefetched:
        """Return the result of a step; unless it is the `last` one, start computing the next."""
        number, future = self.pending or (None, None)
        if future is None or number != step:
            future = self.pool.submit(self.compute, step)
        result = future.result()
        self.pending = None if last else (step + 1, self.pool.submit(self.compute, step + 1))
        return result

    def close(self) -> None:
        """Wait for the running computation, and stop the thread."""
        self.pool.shutdown(cancel_futures=True)
