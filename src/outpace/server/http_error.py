"""Errors of requests, as clients receive them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
"""Error types by status; all others are `invalid_request_error`."""

CONTEXT_CODE = "context_length_exceeded"
"""Code of requests that exceed the context."""

MAX_ERROR_CHARACTERS = 2000
"""Maximum number of characters of a message, which may quote arbitrary input."""


class HttpError(Exception):
    """A request that ends with an error: HTTP status and OpenAI error object."""

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
        """OpenAI's error code, if any."""
        self.headers = dict(headers or {})

    @property
    def error_object(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self)[:MAX_ERROR_CHARACTERS],
                "type": ERROR_TYPES.get(self.status, "invalid_request_error"),
                "param": None if self.param is None else self.param[:MAX_ERROR_CHARACTERS],
                "code": self.code,
            }
        }

    @property
    def body(self) -> bytes:
        """The error as JSON in ASCII, so that any quoted input can be encoded."""
        return json.dumps(self.error_object).encode()

    @property
    def event(self) -> bytes:
        """The error as the last event of a stream."""
        return b"data: " + self.body + b"\n\n"

    def to_response(self) -> Response:
        return Response(self.body, self.status, self.headers, "application/json")


class ClientDisconnectedError(HttpError):
    """The client has disconnected; this error is not sent."""

    def __init__(self) -> None:
        super().__init__(499, "the client has disconnected")


ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", *ERROR_TYPES.values()]},
                "param": {"type": ["string", "null"], "description": "Path of the field."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
"""JSON schema of an error object."""
