"""Ctrl-C and SIGTERM between the steps of a run instead of within one."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

AGAIN = 1.0
"""Seconds within which two signals are one: a launcher may send its own to a process as well."""

USUAL: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
"""Signals that end a run, and their handlers where nobody has set others."""


@contextmanager
def held(say: Callable[[str], None] = print) -> Iterator[Callable[[], int]]:
    """Whether a signal that ends the run came meanwhile: its number, else 0; a second one ends it.

    Signals that are ignored, as behind `nohup`, or handled by others stay so; all of them do
    outside the main thread.
    """
    noted, since = 0, 0.0

    def note(number: int, frame: Any) -> None:
        nonlocal noted, since
        if not noted:
            noted, since = number, time.monotonic()
            again = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
            say(f"stops after this step; {again} again stops at once, without a checkpoint")
        elif time.monotonic() - since > AGAIN:
            raise ended(number)

    mine = {number: usual for number, usual in USUAL.items() if signal.getsignal(number) is usual}
    if current_thread() is not main_thread():
        mine = {}
    for number in mine:
        signal.signal(number, note)
    try:
        yield lambda: noted
    finally:
        for number, usual in mine.items():
            signal.signal(number, usual)


def ended(number: int) -> BaseException:
    """What ends a process that a signal stopped: `KeyboardInterrupt`, or its status."""
    stops = number in (0, signal.SIGINT)
    return KeyboardInterrupt() if stops else SystemExit(128 + number)
