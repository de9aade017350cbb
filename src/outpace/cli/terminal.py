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
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, NoReturn

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

if TYPE_CHECKING:
    from prompt_toolkit.history import History

    from outpace.api.pending_answer import Stream

COMPLETION = "_OUTPACE_COMPLETE"
"""Environment variable by which a shell asks for completions."""

INPUT_PROMPT = "> "

terminal_restorer = ExitStack()
"""Restores the terminal at exit, and before a process exits without `atexit`."""


def is_interactive() -> bool:
    return all(each is not None and each.isatty() for each in (sys.stdin, sys.stdout))


def open_prompt() -> None:
    """Show the prompt before anything is loaded, and keep what is typed until it is read."""
    if not is_interactive():
        return
    error_console.quiet = True  # a spinner would overwrite the prompt
    terminal_restorer.callback(write_code, "\r")
    write_code(INPUT_PROMPT)
    atexit.register(terminal_restorer.close)
    set_typing(echo=True)


def set_typing(*, echo: bool) -> None:
    """Keep all that is typed for the next prompt, shown or not; Ctrl-C interrupts as before.

    A terminal's canonical mode drops everything after 4,095 characters of a line.
    """
    with suppress(ImportError):  # Windows does not drop input
        import termios

        with suppress(termios.error):
            before = termios.tcgetattr(sys.stdin)
            modes: list[Any] = [*before[:6], list(before[6])]
            modes[3] &= ~(termios.ICANON | termios.ECHO)
            modes[3] |= termios.ECHO * echo
            modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, modes)
            terminal_restorer.callback(termios.tcsetattr, sys.stdin, termios.TCSADRAIN, before)


def write_code(code: str) -> None:
    with suppress(OSError):
        print(code, end="", flush=True)


def read_typed_messages(notice: str | None = None) -> Iterator[str]:
    """Yield messages typed at a prompt; what is typed meanwhile waits in the input line.

    `notice` stands before the first prompt. Pasted lines are one message. Ctrl-C clears the input
    line; a second one raises `KeyboardInterrupt`, and Ctrl-D ends.
    """
    from prompt_toolkit import PromptSession

    error_console.quiet = False
    write_code("\r\x1b[J")  # the prompt draws again what was echoed
    set_typing(echo=False)
    if notice is not None:
        error_console.print(notice, style="dim", soft_wrap=True)
    session: PromptSession[str] = PromptSession(INPUT_PROMPT, history=open_history())
    interrupted = False
    while True:
        try:
            yield session.prompt().strip("\r\n")
            interrupted = False
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            error_console.print("Ctrl-C again or Ctrl-D leaves the conversation", style="dim")


def open_history() -> History:
    """Return the messages typed in earlier runs, in a file that only the user can read.

    Without a file that can be written, messages are kept for this run only.
    """
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "outpace")
    path = folder / "chat_history"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except (OSError, RuntimeError):
        return InMemoryHistory()

    class UserHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk ends no conversation
                super().store_string(string)

    return UserHistory(path)


FAILED, INTERRUPTED, TERMINATED = 1, 130, 143
"""Exit statuses: an error not caused by the user, Ctrl-C, and SIGTERM."""


def exit_with_error(message: str, status: int = 2) -> NoReturn:
    """Print one line to standard error, with control characters escaped, and exit."""
    terminal_restorer.close()
    line = " ".join(message.split())
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    with suppress(OSError):  # the status remains where standard error cannot be written
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


READING_SECONDS = 1.0
"""Seconds after which a prompt that is still being read has a bar."""


def show_reading(stream: Stream) -> None:
    """Read the prompt of an answer, at a terminal with a bar if that takes long."""
    if not error_console.is_terminal:
        return
    began = time.monotonic()
    with ExitStack() as stack:
        bars: ProgressBars | None = None
        for progress in stream.read_prompt():
            if bars is None and time.monotonic() - began > READING_SECONDS:
                bars = stack.enter_context(ProgressBars())
                bar = bars.add_task("prompt", total=progress.total)
            if bars is not None:
                bars.update(bar, completed=progress.processed)


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
