"""Middleware before every route: API key, host and origin checks, limits; parsing of bodies."""

from __future__ import annotations

import asyncio
import hmac
import re
from reprlib import repr as brief
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.errors import OptionError
from outpace.server.http_error import ClientDisconnectedError, HttpError
from outpace.server.schema import MAX_BODY_BYTES

UNSUPPORTED_FIELDS = {
    "not supported yet": (
        *("audio", "prediction", "verbosity", "best_of"),
        *("web_search_options", "refusal", "functions", "function_call"),
    ),
    "only text is supported": ("modalities",),
    "nothing is stored, so send the whole conversation": ("previous_response_id", "conversation"),
}

REFUSAL_REASONS = {name: reason for reason, names in UNSUPPORTED_FIELDS.items() for name in names}
"""Fields of OpenAI's with unsupported values, and the reason given."""

RequestType = TypeVar("RequestType", bound=BaseModel)

UNION_TAG = re.compile(
    r"str|int|float|bool|none|NamedChoice|\[key\]|(list|dict|constrained-|function-|literal).*"
)

JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)

MAX_UNCHECKED_BYTES = 2**16
"""Size up to which every body is fast to parse."""

VALUE_LIMITS = {
    "values": (b",", 2**18),
    "lists and objects": (b"[{", 2**14),
    "fields": (b":", 2**14),
}
"""Maximum counts in a body, and the bytes outside of strings that are counted."""


def check_body_complexity(body: bytes) -> None:
    if len(body) <= MAX_UNCHECKED_BYTES:
        return
    stripped = JSON_STRING.sub(b"", body)
    for what, (marks, maximum) in VALUE_LIMITS.items():
        if sum(stripped.count(mark) for mark in marks) > maximum:
            raise HttpError(
                400, f"the body must have at most {maximum} {what}", code="too_many_values"
            )


def parse_request(kind: type[RequestType], body: bytes) -> RequestType:
    check_body_complexity(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise validation_http_error(error) from None


def validation_http_error(error: ValidationError) -> HttpError:
    """Return the first error, reported for the deepest field where several types are allowed."""
    # Unsupported features come first, since other fields may be invalid only because of them.
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return HttpError(400, f"the body must be valid JSON: {first['msg']}")
    related = [each for each in errors if each["loc"][:1] == first["loc"][:1]]
    location = max(
        map(error_path, related),
        key=lambda location: (unsupported_depth(location) is not None, len(location)),
    )
    related = [each for each in related if error_path(each) == location]
    # If one of the types matches, report only its other errors.
    worst = [each for each in related if not each["type"].endswith("_type")] or related
    message = " or ".join(dict.fromkeys(map(pydantic_message, worst)))
    cause = first.get("ctx", {}).get("error")
    if not location and isinstance(
        cause, OptionError
    ):  # raised by a validator of the whole request
        return HttpError(400, str(cause), param=cause.param)
    if not location:
        return HttpError(400, "the body must be a JSON object")
    if (end := unsupported_depth(location)) is not None:
        location = location[: end + 1]
    param = ".".join(map(str, location))
    return HttpError(400, f"{param}: {describe_error(location, worst[0], message)}", param=param)


def unsupported_depth(place: tuple[str | int, ...]) -> int | None:
    depth = 2 if place[:1] == ("messages",) else 0
    step = place[depth] if len(place) > depth else None
    return depth if step in REFUSAL_REASONS or (depth and step == "role") else None


def pydantic_message(error: Any) -> str:
    """Return pydantic's message, reworded for lists of the wrong length."""
    bounds = {"too_long": "at most {max_length}", "too_short": "at least {min_length}"}
    if (bound := bounds.get(error["type"])) is None:
        return str(error["msg"])
    count = error["ctx"]["actual_length"]
    actual = "more" if count is None else count  # pydantic reports no count for objects
    return f"must have {bound.format(**error['ctx'])} entries, got {actual}"


def describe_error(place: tuple[str | int, ...], error: Any, message: str) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown field"
    if error["type"] == "missing":
        return "is required"
    if unsupported_depth(place) is not None and place[-1] in REFUSAL_REASONS:
        return f"{REFUSAL_REASONS[str(place[-1])]}; leave the field out"
    if place[-1] == "role" and error["input"] == "function":
        return "'function' is not supported yet; use the role 'tool'"
    if place[-1] == "type":
        return f"{brief(error['input'])} is not supported yet"
    text = re.sub("(Input|String) should", "must", message.removeprefix("Value error, "))
    if error["type"] in ("too_long", "too_short"):
        return text
    return f"{text}, got {brief(error['input'])}"


def error_path(error: Any) -> tuple[str | int, ...]:
    """Return the location of an error without the union types that pydantic tried."""
    place = error["loc"]
    inner = place[:-1] if error["type"] in ("extra_forbidden", "missing") else place
    fields = tuple(step for step in inner if isinstance(step, int) or not UNION_TAG.fullmatch(step))
    return fields + place[len(inner) :]


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
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self.check_request(scope)
            if scope["method"] == "HEAD":  # HTTP sends its answer without the body
                scope = {**scope, "method": "GET"}
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
    headers = {"Connection": "close"}
    return HttpError(413, f"the body must have at most {MAX_BODY_BYTES} bytes", headers=headers)
