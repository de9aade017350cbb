"""The terminal: what is written to it, and signs of life while somebody waits."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from threading import current_thread, main_thread
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from outpace.cli.exit import INTERRUPTED, TERMINATED, fail
from outpace.cli.keyboard import held

PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
"""Prompts and answers are shown as they are."""

console = Console(**PLAIN)

errors = Console(stderr=True, **PLAIN)
"""For what is no result."""

EVERY = 10.0
"""Seconds between lines about a wait, where no bar can be seen."""


def check_input() -> None:
    """Raise `ValueError` where standard input was closed."""
    if sys.stdin is None:
        raise ValueError("standard input is closed: give the prompt as an argument, or in a pipe")


def piped() -> Console:
    """What holds long lines, where nobody reads them at a terminal."""
    return Console(width=200, **PLAIN)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner with what is done meanwhile, where there is a terminal; takes a word on how far."""
    if not errors.is_terminal:
        yield lambda far: None
        return
    with errors.status(Text(what)) as status:
        yield lambda far: status.update(Text(f"{what}, {far}"))


@contextmanager
def loading(what: str) -> Iterator[None]:
    """`waiting`, and Ctrl-C ends the process there and then.

    An exception would abort it, with words of C++, where PyTorch's own start calls Python.
    """
    before = signal.getsignal(signal.SIGINT)
    usual = before is signal.default_int_handler and current_thread() is main_thread()
    with ExitStack() as shown:
        shown.enter_context(waiting(what))

        def end(*_: object) -> NoReturn:
            try:
                shown.close()
                held.close()
                fail("interrupted", INTERRUPTED)
            finally:
                os._exit(INTERRUPTED)

        if usual:
            shown.callback(signal.signal, signal.SIGINT, before)
            signal.signal(signal.SIGINT, end)
        yield


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the process as Ctrl-C does, so that what is half written is removed."""

    def end(*_: object) -> NoReturn:
        raise SystemExit(TERMINATED)  # `main` prints the line

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Bars(Progress):
    """Progress bars, gone once they are full; without a terminal a line now and then."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        super().__init__(*columns, TimeRemainingColumn(), console=errors, transient=True)
        self.reported = time.monotonic()
        self.begun: dict[TaskID, tuple[float, float]] = {}

    def start(self) -> None:
        """Show them, where they can be seen."""
        if errors.is_terminal:
            super().start()

    def stop(self) -> None:
        """Take them away."""
        if errors.is_terminal:
            super().stop()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Move a bar, or write how much is completed and the time left."""
        super().update(task_id, **changes)
        if errors.is_terminal:
            return
        now = time.monotonic()
        task = self.tasks[self.task_ids.index(task_id)]
        began, before = self.begun.setdefault(task_id, (now, task.completed))
        if now - self.reported < EVERY:
            return
        self.reported = now
        line = f"{task.description}: {task.completed:g} of {task.total:g}"
        if task.completed > before and now > began and task.total is not None:
            left = (now - began) * (task.total - task.completed) / (task.completed - before)
            line += f", {timedelta(seconds=round(left))} left"
        errors.print(line, soft_wrap=True)


def bars() -> Progress:
    """Progress bars on standard error."""
    return Bars()
