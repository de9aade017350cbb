"""Reader of server-sent events with single-line data, as OpenAI-compatible servers send them."""

from __future__ import annotations

DATA_PREFIX = b"data:"
MAX_LINE_BYTES = 1 << 24
"""Maximum bytes of a line, so that a server without line feeds cannot exhaust memory."""


class EventReader:
    """Converts chunks of bytes, split anywhere, to the data of complete events."""

    def __init__(self) -> None:
        self.incomplete_line = b""

    def read_chunk(self, chunk: bytes) -> list[bytes]:
        """Return the data of events completed by a chunk; other lines are skipped.

        Raises:
            ValueError: a line exceeds `MAX_LINE_BYTES`.
        """
        *lines, self.incomplete_line = (self.incomplete_line + chunk).split(b"\n")
        if len(self.incomplete_line) > MAX_LINE_BYTES:
            raise ValueError(f"a line of the stream has more than {MAX_LINE_BYTES} bytes")
        return [line[len(DATA_PREFIX) :].strip() for line in lines if line.startswith(DATA_PREFIX)]
