"""Typed messages; at a terminal, pasted text of several lines is one message."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

INPUT_PROMPT = "> "
PASTE_PAUSE = 0.02
"""Seconds within which the next line of a paste arrives if the terminal does not mark pastes."""

PASTE_MARKS_ON, PASTE_MARKS_OFF = "\x1b[?2004h", "\x1b[?2004l"
"""Enable and disable marks around pasted text (bracketed paste)."""

terminal_restorer = ExitStack()
"""Restores the terminal at exit, and before a process exits without `atexit`."""


def is_interactive() -> bool:
    """Return whether standard input and output are both a terminal."""
    return all(each is not None and each.isatty() for each in (sys.stdin, sys.stdout))


def buffer_typed_input() -> None:
    """Keep input of any length that is typed while no read is pending, until the process exits.

    A terminal's canonical mode drops everything after 4,095 characters of a line. Echo stays on,
    since readline shows nothing at a terminal without echo.
    """
    if not is_interactive():
        return
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
            atexit.register(terminal_restorer.close)


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
    """Write a control code to the terminal."""
    with suppress(OSError):
        print(code, end="", flush=True)


def read_typed_messages(ends: Callable[[str], bool]) -> Iterator[str]:
    """Yield messages typed at a prompt; lines that arrive together are one message.

    A line for which `ends` is true, such as a command, is a separate message.
    """
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
