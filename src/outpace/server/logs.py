"""Log lines for the operator of a server, as text or JSON, and the access log."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.version import __version__

LOG = logging.getLogger("outpace.server")
ACCESS_LOG = logging.getLogger("outpace.server.access")
LOADER_LOG = logging.getLogger("outpace.api.engine_loop")

REQUEST_FIELDS: ContextVar[dict[str, Any]] = ContextVar("request fields")
"""Fields of the log line of the current request."""

PROGRESS_INTERVAL, MIN_LOGGED_BYTES = 5.0, 2**28
"""Seconds between progress lines, and model size in bytes from which progress is logged."""


LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """Format each record as one line of JSON, with the id of the request that it belongs to."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if number := REQUEST_FIELDS.get({}).get("request_id"):
            fields["request_id"] = number
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def start_log(*, verbose: bool, log_format: LogFormat = "text") -> None:
    """Log to standard error."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    LOG.setLevel(logging.INFO)
    LOADER_LOG.setLevel(logging.INFO)
    ACCESS_LOG.setLevel(logging.INFO if verbose or log_format == "json" else logging.WARNING)


def add_request_fields(**fields: Any) -> None:
    REQUEST_FIELDS.get({}).update(fields)


def server_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_start(host: str, port: int) -> None:
    LOG.info("outpace %s at %s: loading the models", __version__, server_url(host, port))


def log_address(host: str, port: int) -> None:
    """Log where the server listens."""
    LOG.info("listening on %s (open it in a browser for the playground)", server_url(host, port))


@contextmanager
def log_loading(name: str, place: str) -> Iterator[None]:
    from outpace.checkpoints.hub import report_load_progress  # takes long to import

    LOG.info("loading %s", name if name == place else f"{name} ({place})")
    last = time.monotonic()

    def report_progress(done: int, total: int) -> None:
        nonlocal last
        if total >= MIN_LOGGED_BYTES and time.monotonic() > last + PROGRESS_INTERVAL:
            last = time.monotonic()
            LOG.info("loading %s, %.1f of %.1f GiB", name, done / 2**30, total / 2**30)

    with report_load_progress(report_progress):
        yield


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
            figures = describe_answer(fields)
            ACCESS_LOG.info("%s %s: %d in %.3f s (%s)%s", *line, figures, extra={"fields": fields})
            REQUEST_FIELDS.reset(token)


def describe_answer(fields: Mapping[str, Any]) -> str:
    """Return how an answer was computed, after a colon; empty for a request without one."""
    if not fields.get("forwards"):
        return ""
    read, cached = fields["prompt_tokens"], fields["cached_tokens"]
    written, drafted = fields["completion_tokens"], fields["draft_tokens"]
    parts = [
        f"{read} tokens read{f', {cached} of them cached' if cached else ''}"
        f"{describe_speed(read - cached, fields['read_seconds'])}",
        f"{written} written{describe_speed(written, fields['write_seconds'])}",
        f"{written / fields['forwards']:.2f} per forward",
    ]
    if drafted:
        parts.append(f"{fields['accepted_tokens']} of {drafted} drafts accepted")
    return f": {'; '.join(parts)}"


def describe_speed(tokens: int, seconds: float) -> str:
    return f" at {tokens / seconds:.0f} per second" if seconds > 0 and tokens > 0 else ""


def request_id(headers: dict[bytes, bytes]) -> bytes:
    """Return the id that the client sent, if it is valid, or a random one."""
    sent = headers.get(ID_HEADER, b"")
    return sent if VALID_ID.fullmatch(sent) else secrets.token_hex(12).encode()
