"""What the next step needs is made while a step runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """Calls a function of a step one step ahead, in a thread of its own.

    It must be a function of the step alone. What it raises is raised where its result is wanted.
    """

    def __init__(self, make: Callable[[int], Made]) -> None:
        self.make = make
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="outpace-data")
        self.begun: tuple[int, Future[Made]] | None = None

    def __call__(self, step: int, *, last: bool = False) -> Made:
        """What a step needs; unless it is the `last` one, that of the next is begun."""
        number, future = self.begun or (None, None)
        if future is None or number != step:
            future = self.pool.submit(self.make, step)
        made = future.result()
        self.begun = None if last else (step + 1, self.pool.submit(self.make, step + 1))
        return made

    def close(self) -> None:
        """Wait for what is begun, and begin nothing more."""
        self.pool.shutdown(cancel_futures=True)
