"""The terminal: consoles, spinners and progress bars."""

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

from outpace.cli.exit import INTERRUPTED, TERMINATED, exit_with_error
from outpace.cli.keyboard import terminal_restorer

CONSOLE_OPTIONS: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
"""Prompts and answers are printed literally."""

console = Console(**CONSOLE_OPTIONS)

error_console = Console(stderr=True, **CONSOLE_OPTIONS)
"""Console of everything that is not a result."""

REPORT_INTERVAL = 10.0
"""Seconds between lines of progress without a terminal."""


def check_standard_input() -> None:
    """Raise `ValueError` if standard input is closed."""
    if sys.stdin is None:
        raise ValueError(
            "standard input is closed: give the prompt as an argument or through a pipe"
        )


def wide_console() -> Console:
    """Return a console for long lines of output that is not a terminal."""
    return Console(width=200, **CONSOLE_OPTIONS)


@contextmanager
def show_spinner(what: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner at a terminal; the yielded function reports progress."""
    if not error_console.is_terminal:
        yield lambda progress: None
        return
    with error_console.status(Text(what)) as status:
        yield lambda progress: status.update(Text(f"{what}, {progress}"))


@contextmanager
def show_startup_spinner(what: str) -> Iterator[None]:
    """Show a spinner, and exit at once on Ctrl-C.

    An exception would abort the process with a C++ message where PyTorch's initialization calls
    Python.
    """
    before = signal.getsignal(signal.SIGINT)
    replaceable = before is signal.default_int_handler and current_thread() is main_thread()
    with ExitStack() as spinner:
        spinner.enter_context(show_spinner(what))

        def exit_now(*_: object) -> NoReturn:
            try:
                spinner.close()
                terminal_restorer.close()
                exit_with_error("interrupted", INTERRUPTED)
            finally:
                os._exit(INTERRUPTED)

        if replaceable:
            spinner.callback(signal.signal, signal.SIGINT, before)
            signal.signal(signal.SIGINT, exit_now)
        yield


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Exit on SIGTERM as on Ctrl-C, which removes incomplete files."""

    def raise_exit(*_: object) -> NoReturn:
        raise SystemExit(TERMINATED)  # `main` prints the line

    before = signal.signal(signal.SIGTERM, raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ProgressBars(Progress):
    """Progress bars that disappear when complete; without a terminal, occasional lines."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        super().__init__(*columns, TimeRemainingColumn(), console=error_console, transient=True)
        self.last_report = time.monotonic()
        self.task_starts: dict[TaskID, tuple[float, float]] = {}

    def start(self) -> None:
        """Show the bars at a terminal."""
        if error_console.is_terminal:
            super().start()

    def stop(self) -> None:
        """Remove the bars."""
        if error_console.is_terminal:
            super().stop()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Update a bar or, without a terminal, print progress and remaining time."""
        super().update(task_id, **changes)
        if error_console.is_terminal:
            return
        now = time.monotonic()
        task = self.tasks[self.task_ids.index(task_id)]
        began, before = self.task_starts.setdefault(task_id, (now, task.completed))
        if now - self.last_report < REPORT_INTERVAL:
            return
        self.last_report = now
        line = f"{task.description}: {task.completed:g} of {task.total:g}"
        if task.completed > before and now > began and task.total is not None:
            left = (now - began) * (task.total - task.completed) / (task.completed - before)
            line += f", {timedelta(seconds=round(left))} left"
        error_console.print(line, soft_wrap=True)


def progress_bars() -> Progress:
    """Create progress bars on standard error."""
    return ProgressBars()
