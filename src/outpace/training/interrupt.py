"""Deferral of Ctrl-C and SIGTERM to the end of a training step."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

SAME_SIGNAL_SECONDS = 1.0
"""Seconds within which two signals count as one: a launcher may forward the terminal's signal."""

DEFAULT_HANDLERS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
"""Signals that end a run, with Python's default handlers."""


@contextmanager
def catch_signals(print_line: Callable[[str], None] = print) -> Iterator[Callable[[], int]]:
    """Record the first signal that would end the run; a second one ends it.

    Only default handlers are replaced, and only in the main thread: ignored signals (`nohup`) and
    foreign handlers are left alone.

    Yields:
        A function that returns the number of the recorded signal, 0 if there is none.
    """
    received, received_at = 0, 0.0

    def handle_signal(number: int, frame: Any) -> None:
        nonlocal received, received_at
        if not received:
            received, received_at = number, time.monotonic()
            again = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
            print_line(
                f"stopping after this step; {again} again stops at once, without a checkpoint"
            )
        elif time.monotonic() - received_at > SAME_SIGNAL_SECONDS:
            raise exit_exception(number)

    replaced = {
        number: default
        for number, default in DEFAULT_HANDLERS.items()
        if signal.getsignal(number) is default
    }
    if current_thread() is not main_thread():
        replaced = {}
    for number in replaced:
        signal.signal(number, handle_signal)
    try:
        yield lambda: received
    finally:
        for number, default in replaced.items():
            signal.signal(number, default)


def exit_exception(number: int) -> BaseException:
    """Return the exception to raise after a signal: `KeyboardInterrupt`, or `SystemExit`."""
    stops = number in (0, signal.SIGINT)
    return KeyboardInterrupt() if stops else SystemExit(128 + number)
