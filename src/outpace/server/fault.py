"""What a client is told when its request is not answered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
"""Type of error by status; all others are `invalid_request_error`."""

LONGEST = 2000
"""Most characters of a message: what it quotes may be anything."""


class Fault(Exception):
    """A request that ends with an error: its status, and what the envelope says.

    `param` is the dotted path of the field that is to blame.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def envelope(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        return {
            "error": {
                "message": str(self)[:LONGEST],
                "type": KINDS.get(self.status, "invalid_request_error"),
                "param": None if self.param is None else self.param[:LONGEST],
                "code": self.code,
            }
        }

    @property
    def body(self) -> bytes:
        """JSON in ASCII, which has an encoding whatever a client has sent."""
        return json.dumps(self.envelope).encode()

    @property
    def event(self) -> bytes:
        """The end of a stream."""
        return b"data: " + self.body + b"\n\n"

    def response(self) -> Response:
        """The answer to a request of which nothing was sent yet."""
        return Response(self.body, self.status, self.headers, "application/json")


class Gone(Fault):
    """The client has gone; nobody reads this."""

    def __init__(self) -> None:
        super().__init__(499, "the client has gone")


ENVELOPE = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", *KINDS.values()]},
                "param": {"type": ["string", "null"], "description": "Path of the field."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
"""The schema of an envelope."""
