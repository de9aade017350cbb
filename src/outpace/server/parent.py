"""The end of a process with its parent; imports nothing large, since that takes seconds."""

from __future__ import annotations

import os
from threading import Thread


def follow() -> None:
    """End with the parent, which holds the other end of standard input, whatever happens."""
    Thread(target=watch, daemon=True).start()


def watch() -> None:
    """Wait for the parent to end, and end then."""
    while os.read(0, 1):
        pass
    os._exit(0)
