"""The pieces of an answer, as whoever asked waits for them."""

from __future__ import annotations

from collections.abc import Iterator

from outpace.api.driver import Driver
from outpace.api.output import Answer, Output


class Stream(Iterator[str]):
    """Pieces of one answer, one for each forward that committed text; then `output` is set.

    Closing it, or leaving it to the garbage collector, cancels the request.
    """

    def __init__(self, driver: Driver, answer: Answer) -> None:
        self.driver = driver
        self.answer = answer
        self.output: Output | None = None

    def __next__(self) -> str:
        """The next piece; raises what the method raised."""
        while self.output is None:
            over = self.answer.job.over  # read first: the last piece comes before it
            if self.answer.pieces:
                if text := self.answer.pieces.popleft().text:
                    return text
            elif over:
                self.output = self.answer.output()
            else:
                self.driver.step()
        raise StopIteration

    def close(self) -> None:
        """Cancel what is left of the request."""
        self.driver.cancel(self.answer.job)

    def __del__(self) -> None:
        # The collector may run in any thread, also in the one that drives.
        if self.output is None:
            self.driver.drop(self.answer.job)
