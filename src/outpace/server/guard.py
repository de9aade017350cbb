"""What stands before every route: keys, and bounds for what a client sends."""

from __future__ import annotations

import asyncio
import hmac
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.server.bounds import BODY
from outpace.server.fault import Fault, Gone

OPEN = ("/health", "/")
"""Routes that need no key: whether the server lives, and the page, which asks for the key."""


HERE = re.compile(rb"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]*)?", re.IGNORECASE)
"""Hosts that no page from elsewhere can have: a name of its own may lead to this machine, too."""


class Guard:
    """Lets requests through that have the key, and no more of a body than is allowed.

    Where it is `local`, they must also be meant for this machine by its own name.
    """

    def __init__(
        self, app: ASGIApp, *, key: bytes | None, local: bool, read_seconds: float
    ) -> None:
        self.app = app
        self.key = key
        self.local = local
        self.read_seconds = read_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self.check(scope)
        except Fault as fault:
            await fault.response()(scope, receive, send)
        else:
            await self.app(scope, Body(receive, self.read_seconds), send)

    def check(self, scope: Scope) -> None:
        """Raise `Fault` for a request without the key, from another site, or with a long body."""
        headers = dict(scope["headers"])
        if self.local:
            check_host([value for name, value in scope["headers"] if name == b"host"])
            check_origin(scope["method"], headers.get(b"origin", b""))
        if self.key is not None and scope["path"] not in OPEN:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            same = hmac.compare_digest(given.strip(), self.key)
            if not (same and scheme.lower() == b"bearer"):
                message = "no valid API key: send the header 'Authorization: Bearer KEY'"
                headers = {"WWW-Authenticate": "Bearer"}
                raise Fault(401, message, code="invalid_api_key", headers=headers)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > BODY:
            raise too_large()


def check_host(hosts: list[bytes]) -> None:
    """Raise `Fault` for a host under which a page from elsewhere may ask; browsers name one."""
    for host in hosts:
        if not HERE.fullmatch(host):
            raise Fault(
                421,
                f"host: this server has no key and answers as 127.0.0.1, localhost or [::1] only, "
                f"not as {host[:256].decode('latin-1')!r}; give it a key, or --insecure",
            )


def check_origin(method: str, origin: bytes) -> None:
    """Raise `Fault` where a page from elsewhere asks, which cannot read the answer but costs it."""
    _, _, host = origin.partition(b"://")
    if origin and method not in ("GET", "HEAD") and not HERE.fullmatch(host):
        raise Fault(
            403,
            f"origin: this server has no key and answers pages of this machine only, "
            f"not of {origin[:256].decode('latin-1')!r}; give it a key, or --insecure",
        )


class Body:
    """Messages of a client, whose body has a bound and must come in time."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self.receive = receive
        self.deadline = asyncio.get_running_loop().time() + seconds
        self.size = 0
        self.whole = False

    async def __call__(self) -> Message:
        """The next message; `Fault` where there is too much, or nothing for too long."""
        if self.whole:
            return await self.receive()
        try:
            async with asyncio.timeout_at(self.deadline):
                message = await self.receive()
        except TimeoutError:
            close = {"Connection": "close"}
            raise Fault(408, "the body did not come in time", headers=close) from None
        if message["type"] == "http.disconnect":
            raise Gone
        self.size += len(message.get("body", b""))
        self.whole = not message.get("more_body", False)
        if self.size > BODY:
            raise too_large()
        return message


def too_large() -> Fault:
    """A refusal, after which the rest of the body is not read."""
    close = {"Connection": "close"}
    return Fault(413, f"the body is larger than {BODY} bytes", headers=close)
