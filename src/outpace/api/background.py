"""Work in threads beside the thread that drives the engines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Lock
from typing import TypeVar

T = TypeVar("T")

SWITCH_INTERVAL = 1e-5
"""Interpreter switch interval during background work.

An engine releases the GIL in every operation, and would wait the default 5 ms for it each time.
"""


class BackgroundWork:
    """Runs functions in any number of threads without delaying the thread of the engines."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.running = 0
        self.usual_interval = sys.getswitchinterval()

    def run(self, work: Callable[[], T]) -> T:
        """Run a function in this thread, and return its result."""
        self.count_running(1)
        try:
            return work()
        finally:
            self.count_running(-1)

    def count_running(self, change: int) -> None:
        """Shorten the switch interval before the first function, and restore it after the last."""
        with self.lock:
            if not self.running:
                self.usual_interval = sys.getswitchinterval()
            self.running += change
            sys.setswitchinterval(SWITCH_INTERVAL if self.running else self.usual_interval)
