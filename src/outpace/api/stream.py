"""Iterator over the text of one answer."""

from __future__ import annotations

from collections.abc import Iterator

from outpace.api.driver import Driver
from outpace.api.output import Output
from outpace.api.pending_answer import PendingAnswer


class Stream(Iterator[str]):
    """Iterator over the text of one answer, one piece per forward that committed text.

    Closing the stream, or letting it be garbage-collected, cancels the request.

    Attributes:
        output: The `Output`, once the iterator is exhausted; None before.
    """

    def __init__(self, driver: Driver, answer: PendingAnswer) -> None:
        self.driver = driver
        self.answer = answer
        self.output: Output | None = None

    def __next__(self) -> str:
        """Return the next piece of text; raises the error of the method, if any."""
        while self.output is None:
            over = (
                self.answer.job.is_finished
            )  # read first: the last piece is appended before it is set
            if self.answer.pieces:
                if text := self.answer.pieces.popleft().text:
                    return text
            elif over:
                self.output = self.answer.build_output()
            else:
                self.driver.step()
        raise StopIteration

    def close(self) -> None:
        """Cancel the rest of the request."""
        self.driver.cancel(self.answer.job)

    def __del__(self) -> None:
        # The garbage collector may run in any thread, including the driving one.
        if self.output is None:
            self.driver.cancel_later(self.answer.job)
