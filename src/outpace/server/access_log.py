"""Log of requests, each with an id that its client receives as well."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.server.logs import ACCESS_LOG, REQUEST_FIELDS

ID_HEADER = b"x-request-id"
VALID_ID = re.compile(rb"[\w.-]{1,64}")
MAX_PATH_CHARACTERS = 256


class AccessLogMiddleware:
    """Give each request an id, and log its status and duration when its response has ended.

    The id is the `X-Request-Id` of the client, if that has at most 64 letters, digits and `_.-`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request and log it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        number = request_id(dict(scope["headers"]))
        # Encoded, since a decoded path may have line breaks.
        path = quote(scope["path"][:MAX_PATH_CHARACTERS])
        fields: dict[str, Any] = {"request_id": number.decode(), "path": path, "status": 500}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                fields["status"] = message["status"]
                message = {**message, "headers": [*message["headers"], (ID_HEADER, number)]}
            await send(message)

        began, token = time.perf_counter(), REQUEST_FIELDS.set(fields)
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            seconds = fields["seconds"] = round(time.perf_counter() - began, 4)
            line = (scope["method"], path, fields["status"], seconds, fields["request_id"])
            ACCESS_LOG.info("%s %s: %d in %.3f s (%s)", *line, extra={"fields": fields})
            REQUEST_FIELDS.reset(token)


def request_id(headers: dict[bytes, bytes]) -> bytes:
    """Return the id that the client sent, if it is valid, or a random one."""
    sent = headers.get(ID_HEADER, b"")
    return sent if VALID_ID.fullmatch(sent) else secrets.token_hex(12).encode()
