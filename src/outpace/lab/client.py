"""Client of OpenAI-compatible servers that records the times of streamed events."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from time import perf_counter as clock
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from outpace.errors import OptionError, install_extra

try:
    from aiohttp import (
        ClientConnectorError,
        ClientError,
        ClientResponse,
        ClientResponseError,
        ClientSession,
        ClientTimeout,
        TCPConnector,
    )
except ImportError as error:
    raise ValueError(f"{error}; measuring a server {install_extra('load')}") from error

from outpace.lab.load_figures import RequestRecord

DATA_PREFIX = b"data:"
MAX_LINE_BYTES = 1 << 24
"""Maximum bytes of a line, so that a server without line feeds cannot exhaust memory."""

RequestBody = Mapping[str, Any]
"""Body of a request to `/v1/chat/completions` if it has messages, else `/v1/completions`."""

KEEPALIVE_SECONDS = 2.0
"""Seconds that an unused connection is kept: fewer than servers do (uvicorn 5), so that the server
does not close it while a request is being sent."""

MAX_REPORTED_COUNT = 10**9
"""Maximum accepted number of tokens or forwards; larger figures are ignored."""


class EventReader:
    """Converts chunks of bytes, split anywhere, to the data of complete events."""

    def __init__(self) -> None:
        self.incomplete_line = b""

    def read_chunk(self, chunk: bytes) -> list[bytes]:
        """Return the data of events completed by a chunk; other lines are skipped."""
        *lines, self.incomplete_line = (self.incomplete_line + chunk).split(b"\n")
        if len(self.incomplete_line) > MAX_LINE_BYTES:
            raise ValueError(f"a line of the stream has more than {MAX_LINE_BYTES} bytes")
        return [line[len(DATA_PREFIX) :].strip() for line in lines if line.startswith(DATA_PREFIX)]


class RequestError(Exception):
    """A failed request, with the kind of error and the server's message."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind)
        self.kind, self.message = kind, message


class Client:
    """Connections to one server; an async context manager."""

    def __init__(self, url: str, key: str | None = None, *, timeout: float = 600.0) -> None:
        """Check the arguments; no connection is opened yet.

        Args:
            url: the server's address, with or without `/v1`.
            key: API key, sent as bearer token.
            timeout: maximum seconds of a complete answer.
        """
        self.url = base_url(url)
        if not (timeout > 0 and math.isfinite(timeout)):
            raise OptionError("timeout", timeout, "must be a finite number above 0")
        if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
            raise ValueError("api-key must be printable ASCII characters")
        self.timeout = timeout
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def __aenter__(self) -> Client:
        self.session = ClientSession(
            headers=self.headers,
            connector=TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            timeout=ClientTimeout(total=None),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.session.close()

    async def list_models(self) -> list[str]:
        """Return the names of the server's models; `ValueError` if it does not list them."""
        try:
            async with asyncio.timeout(self.timeout):
                async with self.session.get(f"{self.url}/models", allow_redirects=False) as reply:
                    if reply.status != 200:
                        raise RequestError(str(reply.status), error_message(await reply.read()))
                    return [model["id"] for model in (await reply.json())["data"]]
        except RequestError as fault:
            raise ValueError(
                f"{self.url}/models: {explain_error(fault.kind, fault.message)}"
            ) from fault
        except TimeoutError as error:
            raise ValueError(f"{self.url}/models: {explain_error('timeout')}") from error
        except ClientConnectorError as error:
            raise ValueError(f"{self.url}: {explain_error('unreachable', str(error))}") from error
        except (ClientError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.url}/models lists no models; check that it is an OpenAI-compatible API"
            ) from error

    async def send_request(self, body: RequestBody) -> RequestRecord:
        """Send a request and read its answer, streamed or not, depending on the body.

        Errors of the server are recorded in the returned record, never raised.
        """
        record = RequestRecord(began=clock())
        path = "chat/completions" if "messages" in body else "completions"
        try:
            async with (
                asyncio.timeout(self.timeout),
                self.session.post(
                    f"{self.url}/{path}", json=body, allow_redirects=False
                ) as response,
            ):
                await read_response(response, record, streamed=bool(body.get("stream")))
        except RequestError as fault:
            record.error, record.error_message = fault.kind, fault.message
        except TimeoutError:
            record.error = "timeout"
        except ClientConnectorError as error:
            record.error, record.error_message = "unreachable", str(error)
        except ClientResponseError as error:
            record.error, record.error_message = "malformed", error.message
        except (ClientError, OSError) as error:
            record.error, record.error_message = "dropped", str(error)
        record.ended = clock()
        return record


async def read_response(response: ClientResponse, record: RequestRecord, *, streamed: bool) -> None:
    if response.status != 200:
        raise RequestError(str(response.status), error_message(await response.read()))
    if not streamed:
        record_text(record, await response.read(), clock())
    elif response.content_type != "text/event-stream":
        raise RequestError("malformed", f"{response.content_type} instead of an event stream")
    else:
        await read_stream(response, record)


async def read_stream(response: ClientResponse, record: RequestRecord) -> None:
    reader = EventReader()
    async for data in response.content.iter_any():
        now = clock()
        try:
            events = reader.read_chunk(data)
        except ValueError as error:
            raise RequestError("malformed", str(error)) from error
        for event in events:
            if event == b"[DONE]":
                return
            record_text(record, event, now)
    raise RequestError("dropped", "the stream ended without [DONE]")


def record_text(record: RequestRecord, data: bytes, now: float) -> None:
    """Record the text of a chunk or a complete answer; text of the same time is one event."""
    if text := parse_chunk(record, data):
        record.text += text
        if record.events[-1:] != [now]:
            record.events.append(now)


def parse_chunk(record: RequestRecord, data: bytes) -> str:
    """Record the counts of a chunk or complete answer, and return its text."""
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestError("malformed", error_message(data)) from error
    match chunk:
        case {"error": _}:
            raise RequestError("failed", error_message(data))
        case {"choices": list()}:
            pass
        case _:
            raise RequestError("malformed", error_message(data))
    match chunk.get("usage"):
        case {"completion_tokens": int(tokens)} if 0 <= tokens <= MAX_REPORTED_COUNT:
            record.tokens = tokens
    match chunk.get("outpace"):
        case {"forwards": int(forwards)} if 0 <= forwards <= MAX_REPORTED_COUNT:
            record.forwards = forwards
    match chunk["choices"]:
        case [dict(choice), *_]:
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
            return choice_text(choice)
    return ""


def choice_text(choice: dict[str, Any]) -> str:
    match choice.get("delta") or choice.get("message") or choice:
        case {"content": str(text)} | {"text": str(text)} if text:
            return text
        case {"reasoning_content": str(text)} | {"reasoning": str(text)}:
            return text
    return ""


def error_message(data: bytes) -> str:
    """Return the message of an error in OpenAI's format, or the beginning of other data."""
    try:
        message = json.loads(data)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = data.decode(errors="replace")
    return " ".join(str(message).split())[:300]


def explain_error(kind: str, detail: str = "") -> str:
    """Explain in one line why a request could not be measured."""
    hints = {
        "401": "HTTP 401; give the key with --api-key",
        "unreachable": "cannot connect; check that the server is running",
        "timeout": "no complete answer within --timeout",
        "malformed": "not a streamed answer of an OpenAI-compatible server",
    }
    return f"{hints.get(kind, f'HTTP {kind}' if kind.isdigit() else kind)}: {detail}".rstrip(": ")


def base_url(url: str) -> str:
    """Normalise a server's address to end in `/v1`; `ValueError` for an invalid one."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = None
    if not valid:
        raise ValueError(
            f"url must be the address of a server, got {url!r}; write http://127.0.0.1:8000"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("url must be an address without user, query or fragment; see --api-key")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}/v1"
