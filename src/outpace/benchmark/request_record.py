"""Record of one request to a server, with the times of its events."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A request and its answer as measured by a client; times are seconds of one clock.

    Attributes:
        began: time at which the request was sent.
        ended: time at which the answer ended.
        events: times at which text arrived. Data of one read is one event, even if the server
            sent several chunks.
        text: the answer's full text.
        finish_reason: reported by the server.
        tokens: output tokens reported by the server.
        forwards: forward passes of the target, if the server reports them.
        error: None for a complete answer; otherwise an HTTP status, `unreachable`, `dropped`
            (the connection ended before the answer), `timeout`, `failed` (an error event in the
            stream) or `malformed`.
        error_message: the server's message about the error.
    """

    began: float
    ended: float = 0.0
    events: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    tokens: int | None = None
    forwards: int | None = None
    error: str | None = None
    error_message: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text (time to first token); None if there is no text."""
        return self.events[0] - self.began if self.events else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [after - before for before, after in pairwise(self.events)]

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens."""
        if self.ttft is None or self.tokens is None or self.tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.tokens - 1)

    @property
    def e2e(self) -> float:
        """Seconds from sending the request to the end of the answer."""
        return self.ended - self.began
