"""Ctrl-C between the steps of a run instead of within one."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

AGAIN = 1.0
"""Seconds within which two interrupts are one: a launcher may send its own to a process as well."""


@contextmanager
def held(say: Callable[[str], None] = print) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed meanwhile; a second one interrupts at once.

    It stays as it was where interrupts are ignored, as behind `nohup`, and outside the main thread.
    """
    pressed: float | None = None

    def note(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed is None:
            pressed = time.monotonic()
            say("stops after this step; Ctrl-C again stops at once, without a checkpoint")
        elif time.monotonic() - pressed > AGAIN:
            raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or current_thread() is not main_thread():
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed is not None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
