"""What a server logs for its operator: where it is, what it loads, what it has."""

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
"""Seconds between lines on how much of a model is loaded, and bytes from which on there are any."""


def start_log(*, verbose: bool) -> None:
    """Log to standard error; where it is not `verbose`, of other packages what goes wrong alone."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)


def url(host: str, port: int) -> str:
    """The address of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_start(host: str, port: int, models: int) -> None:
    """Log where a server will listen once it has loaded so many models."""
    some = "1 model" if models == 1 else f"{models} models"
    log.info("outpace %s at %s loads %s", __version__, url(host, port), some)


def log_address(host: str, port: int) -> None:
    """Log where a server listens."""
    log.info("listening on %s (the playground, in a browser)", url(host, port))


@contextmanager
def log_loading(name: str, place: str) -> Iterator[None]:
    """Log that a model is loaded, and now and then how much of it."""
    log.info("loading %s", name if name == place else f"{name} ({place})")
    last = time.monotonic()

    def note(done: int, total: int) -> None:
        nonlocal last
        if total >= LARGE and time.monotonic() > last + EVERY:
            last = time.monotonic()
            log.info("loading %s, %.1f of %.1f GiB", name, done / 2**30, total / 2**30)

    with told(note):
        yield
