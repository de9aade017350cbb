"""Log lines for the operator of a server: start, address, loading progress."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from outpace.checkpoints.progress import told
from outpace.version import __version__

log = logging.getLogger("outpace.server")

EVERY, LARGE = 5.0, 2**28
"""Seconds between progress lines, and model size in bytes from which progress is logged."""


def start_log(*, verbose: bool) -> None:
    """Log to standard error; other packages' messages from INFO if verbose, else WARNING."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)


def url(host: str, port: int) -> str:
    """Return the address of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_start(host: str, port: int, models: int) -> None:
    """Log the address and the number of models before they are loaded."""
    count = "1 model" if models == 1 else f"{models} models"
    log.info("outpace %s at %s: loading %s", __version__, url(host, port), count)


def log_address(host: str, port: int) -> None:
    """Log where the server listens."""
    log.info("listening on %s (open it in a browser for the playground)", url(host, port))


@contextmanager
def log_loading(name: str, place: str) -> Iterator[None]:
    """Log that a model is being loaded, with progress for large ones."""
    log.info("loading %s", name if name == place else f"{name} ({place})")
    last = time.monotonic()

    def note(done: int, total: int) -> None:
        nonlocal last
        if total >= LARGE and time.monotonic() > last + EVERY:
            last = time.monotonic()
            log.info("loading %s, %.1f of %.1f GiB", name, done / 2**30, total / 2**30)

    with told(note):
        yield
