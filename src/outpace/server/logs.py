"""Log lines for the operator of a server, as text or JSON: start, address, loading progress."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from outpace.checkpoints.progress import report_load_progress
from outpace.version import __version__

LOG = logging.getLogger("outpace.server")
ACCESS_LOG = logging.getLogger("outpace.server.access")
LOADER_LOG = logging.getLogger("outpace.api.model_loader")

REQUEST_FIELDS: ContextVar[dict[str, Any]] = ContextVar("request fields")
"""Fields of the log line of the current request."""

PROGRESS_INTERVAL, MIN_LOGGED_BYTES = 5.0, 2**28
"""Seconds between progress lines, and model size in bytes from which progress is logged."""


LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """Format each record as one line of JSON, with the id of the request that it belongs to."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
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
    """Log to standard error.

    Args:
        verbose: Whether to log messages of other packages from INFO on, not WARNING, and requests.
        log_format: `json` for lines of JSON, which include requests.
    """
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    LOG.setLevel(logging.INFO)
    LOADER_LOG.setLevel(logging.INFO)
    ACCESS_LOG.setLevel(logging.INFO if verbose or log_format == "json" else logging.WARNING)


def add_request_fields(**fields: Any) -> None:
    """Add fields to the log line of the current request."""
    REQUEST_FIELDS.get({}).update(fields)


def server_url(host: str, port: int) -> str:
    """Return the address of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_start(host: str, port: int, models: int) -> None:
    """Log the address and the number of models before they are loaded."""
    count = "1 model" if models == 1 else f"{models} models"
    LOG.info("outpace %s at %s: loading %s", __version__, server_url(host, port), count)


def log_address(host: str, port: int) -> None:
    """Log where the server listens."""
    LOG.info("listening on %s (open it in a browser for the playground)", server_url(host, port))


@contextmanager
def log_loading(name: str, place: str) -> Iterator[None]:
    """Log that a model is being loaded, with progress for large ones."""
    LOG.info("loading %s", name if name == place else f"{name} ({place})")
    last = time.monotonic()

    def report_progress(done: int, total: int) -> None:
        nonlocal last
        if total >= MIN_LOGGED_BYTES and time.monotonic() > last + PROGRESS_INTERVAL:
            last = time.monotonic()
            LOG.info("loading %s, %.1f of %.1f GiB", name, done / 2**30, total / 2**30)

    with report_load_progress(report_progress):
        yield
