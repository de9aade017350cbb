"""One request to a server, and when what came back."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A request and its answer as a client sees them; times are seconds of one clock.

    Attributes:
        began: when the request was sent.
        ended: when the answer was over.
        events: when text came. What is read at once is one event, however the server cut it.
        text: all of it.
        finish_reason: as the server says it.
        tokens: output tokens, as the server counts them.
        forwards: forward passes of the target, where the server says so.
        error: None for a whole answer; else an HTTP status, `unreachable`, `dropped` (the
            connection ended before the answer), `timeout`, `failed` (an error in the middle of
            the stream) or `malformed`.
        says: what the server said about the error.
    """

    began: float
    ended: float = 0.0
    events: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    tokens: int | None = None
    forwards: int | None = None
    error: str | None = None
    says: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; None where none came."""
        return self.events[0] - self.began if self.events else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [after - before for before, after in pairwise(self.events)]

    @property
    def tpot(self) -> float | None:
        """Seconds for each output token after the first; None below two tokens."""
        if self.ttft is None or self.tokens is None or self.tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.tokens - 1)

    @property
    def e2e(self) -> float:
        """Seconds from sending the request to the end of the answer."""
        return self.ended - self.began
