"""Server-sent events, as far as OpenAI-compatible servers use them: data of one line."""

from __future__ import annotations

DATA = b"data:"
LONGEST = 1 << 24
"""Bytes that a line may have, so that a server without line feeds does not fill the memory."""


class Reader:
    """Bytes as they come, cut anywhere, to the data of whole lines."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data that is whole now; comments, names of events and blank lines are skipped.

        Raises `ValueError` for a line without end.
        """
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        if len(self.rest) > LONGEST:
            raise ValueError(f"a line of the stream has more than {LONGEST} bytes")
        return [line[len(DATA) :].strip() for line in lines if line.startswith(DATA)]
