"""Middleware before every route: API key, host and origin checks, body limits."""

from __future__ import annotations

import asyncio
import hmac
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.server.bounds import MAX_BODY_BYTES
from outpace.server.http_error import ClientDisconnectedError, HttpError

PUBLIC_PATHS = ("/health", "/")
"""Paths without a key: the health check, and the playground, which has a field for the key."""


LOCAL_HOST = re.compile(rb"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]*)?", re.IGNORECASE)
"""Host names that cannot belong to a remote page; any other name may resolve to this machine."""


class GuardMiddleware:
    """Reject requests without a valid key and limit their bodies.

    With `local`, also require a loopback host name and origin.
    """

    def __init__(
        self, app: ASGIApp, *, key: bytes | None, local: bool, read_seconds: float
    ) -> None:
        self.app = app
        self.key = key
        self.local = local
        self.read_seconds = read_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or reject it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self.check_request(scope)
        except HttpError as fault:
            await fault.to_response()(scope, receive, send)
        else:
            await self.app(scope, LimitedBody(receive, self.read_seconds), send)

    def check_request(self, scope: Scope) -> None:
        """Raise `HttpError` for a missing key, a remote page or an oversized body."""
        headers = dict(scope["headers"])
        if self.local:
            check_host([value for name, value in scope["headers"] if name == b"host"])
            check_origin(scope["method"], headers.get(b"origin", b""))
        if self.key is not None and scope["path"] not in PUBLIC_PATHS:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            if not scheme:  # Anthropic's clients
                scheme, token = b"bearer", headers.get(b"x-api-key", b"")
            same = hmac.compare_digest(token.strip(), self.key)
            if not (same and scheme.lower() == b"bearer"):
                message = "no valid API key: send the header 'Authorization: Bearer KEY'"
                headers = {"WWW-Authenticate": "Bearer"}
                raise HttpError(401, message, code="invalid_api_key", headers=headers)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
            raise body_too_large_error()


def check_host(hosts: list[bytes]) -> None:
    """Raise `HttpError` for a non-loopback host, which a remote page may have set."""
    for host in hosts:
        if not LOCAL_HOST.fullmatch(host):
            raise HttpError(
                421,
                f"host: must be 127.0.0.1, localhost or [::1] on a server without an API key, "
                f"got {host[:256].decode('latin-1')!r}; set a key, or --insecure",
            )


def check_origin(method: str, origin: bytes) -> None:
    """Raise `HttpError` for requests of remote pages, which would cost compute."""
    _, _, host = origin.partition(b"://")
    if origin and method not in ("GET", "HEAD") and not LOCAL_HOST.fullmatch(host):
        raise HttpError(
            403,
            f"origin: must be a page of this machine on a server without an API key, "
            f"got {origin[:256].decode('latin-1')!r}; set a key, or --insecure",
        )


class LimitedBody:
    """ASGI receive function that limits the size and the duration of a body."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self.receive = receive
        self.deadline = asyncio.get_running_loop().time() + seconds
        self.size = 0
        self.is_complete = False

    async def __call__(self) -> Message:
        """Return the next message.

        Raises:
            HttpError: If the body is too large or not received in time.
        """
        if self.is_complete:
            return await self.receive()
        try:
            async with asyncio.timeout_at(self.deadline):
                message = await self.receive()
        except TimeoutError:
            headers = {"Connection": "close"}
            raise HttpError(408, "the body was not received in time", headers=headers) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        self.size += len(message.get("body", b""))
        self.is_complete = not message.get("more_body", False)
        if self.size > MAX_BODY_BYTES:
            raise body_too_large_error()
        return message


def body_too_large_error() -> HttpError:
    """Return the error for an oversized body, the rest of which is not read."""
    headers = {"Connection": "close"}
    return HttpError(413, f"the body must have at most {MAX_BODY_BYTES} bytes", headers=headers)
