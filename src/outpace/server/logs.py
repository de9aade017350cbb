"""Log lines for the operator of a server: start, address, loading progress."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from outpace.checkpoints.progress import report_load_progress
from outpace.version import __version__

LOG = logging.getLogger("outpace.server")

PROGRESS_INTERVAL, MIN_LOGGED_BYTES = 5.0, 2**28
"""Seconds between progress lines, and model size in bytes from which progress is logged."""


def start_log(*, verbose: bool) -> None:
    """Log to standard error; other packages' messages from INFO if verbose, else WARNING."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    LOG.setLevel(logging.INFO)


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
