"""The terminal: consoles, spinners and progress bars."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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

COMPLETION = "_OUTPACE_COMPLETE"
"""Environment variable by which a shell asks for completions."""

INPUT_PROMPT = "> "
PASTE_PAUSE = 0.02
"""Seconds within which the next line of a paste arrives if the terminal does not mark pastes."""

PASTE_MARKS_ON, PASTE_MARKS_OFF = "\x1b[?2004h", "\x1b[?2004l"
"""Enable and disable marks around pasted text (bracketed paste)."""

terminal_restorer = ExitStack()
"""Restores the terminal at exit, and before a process exits without `atexit`."""


def is_interactive() -> bool:
    return all(each is not None and each.isatty() for each in (sys.stdin, sys.stdout))


def open_prompt() -> None:
    """Show the prompt before anything is loaded, and keep what is typed until it is read.

    A terminal's canonical mode drops everything after 4,095 characters of a line. Echo stays on,
    since readline shows nothing at a terminal without echo.
    """
    if not is_interactive():
        return
    error_console.quiet = True  # a spinner would overwrite the prompt
    terminal_restorer.callback(write_code, "\r")
    write_code(INPUT_PROMPT)
    atexit.register(terminal_restorer.close)
    with suppress(ImportError):  # Windows does not drop input
        import termios

        with suppress(termios.error):
            descriptor = sys.stdin.fileno()
            before = termios.tcgetattr(descriptor)
            modes: list[Any] = [*before[:6], list(before[6])]
            modes[3] &= ~termios.ICANON
            modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
            termios.tcsetattr(descriptor, termios.TCSADRAIN, modes)
            terminal_restorer.callback(termios.tcsetattr, descriptor, termios.TCSADRAIN, before)
            if has_paste_marks():
                terminal_restorer.callback(write_code, PASTE_MARKS_OFF)
                write_code(PASTE_MARKS_ON)


def has_paste_marks() -> bool:
    """Return whether terminal and line editor support bracketed paste."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        import readline
    except ImportError:
        return False
    return "libedit" not in (readline.__doc__ or "")


def write_code(code: str) -> None:
    with suppress(OSError):
        print(code, end="", flush=True)


def read_typed_messages(ends: Callable[[str], bool]) -> Iterator[str]:
    """Yield messages typed at a prompt; lines that arrive together are one message.

    A line for which `ends` is true, such as a command, is a separate message.
    """
    error_console.quiet = False
    write_code("\r")  # to where the prompt already is
    marks = has_paste_marks()
    if marks:
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    pending: str | None = None
    while True:
        if pending is not None:
            lines, pending = [pending], None
        else:
            try:
                lines = [input(INPUT_PROMPT)]
            except EOFError:
                return
        while not ends(lines[0]) and has_pending_input():
            try:
                line = input()
            except EOFError:
                break
            if ends(line):
                pending = line
                break
            lines.append(line)
        if marks:
            write_code(PASTE_MARKS_ON)  # the line editor has reset it
        yield "\n".join(lines).strip("\r\n")


def has_pending_input() -> bool:
    """Return whether more input has already arrived."""
    from select import select

    try:
        return bool(select([sys.stdin], [], [], PASTE_PAUSE)[0])
    except OSError:  # not supported on Windows
        return False


FAILED, INTERRUPTED, TERMINATED = 1, 130, 143
"""Exit statuses: an error not caused by the user, Ctrl-C, and SIGTERM."""


def exit_with_error(message: str, status: int = 2) -> NoReturn:
    """Print one line to standard error, with control characters escaped, and exit."""
    terminal_restorer.close()
    line = " ".join(message.split())
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    print(f"outpace: {''.join(shown)}", file=sys.stderr)
    sys.exit(status)


CONSOLE_OPTIONS: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
"""Prompts and answers are printed literally."""

console = Console(**CONSOLE_OPTIONS)

error_console = Console(stderr=True, **CONSOLE_OPTIONS)
"""Console of everything that is not a result."""

REPORT_INTERVAL = 10.0
"""Seconds between lines of progress without a terminal."""


def check_standard_input() -> None:
    if sys.stdin is None:
        raise ValueError(
            "standard input is closed: give the prompt as an argument or through a pipe"
        )


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
        if COMPLETION not in os.environ:
            spinner.enter_context(show_spinner(what))

        def exit_now(*_: object) -> NoReturn:
            try:
                spinner.close()
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
        if error_console.is_terminal:
            super().start()

    def stop(self) -> None:
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
