"""Messages from standard input; at a terminal, pasted text of many lines is one message."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

PROMPT = "> "
PAUSE = 0.02
"""Seconds within which the next line of a paste arrives, where the terminal marks no pastes."""

MARKED, UNMARKED = "\x1b[?2004h", "\x1b[?2004l"
"""Ask the terminal to mark pasted text (bracketed paste), and not to."""

held = ExitStack()
"""Restores the terminal: at exit, and before a process ends without one."""


def is_interactive() -> bool:
    """Whether lines are edited at a terminal, which takes both standard input and output."""
    return all(each is not None and each.isatty() for each in (sys.stdin, sys.stdout))


def hold_typed() -> None:
    """Keep what is typed while nothing reads it, in any length, until the process ends.

    A terminal's canonical mode drops what exceeds 4,095 characters of a line. Echo stays on, since
    readline shows nothing of a line at a terminal that does not echo.
    """
    if not is_interactive():
        return
    with suppress(ImportError):  # Windows drops nothing
        import termios

        with suppress(termios.error):
            descriptor = sys.stdin.fileno()
            before = termios.tcgetattr(descriptor)
            modes: list[Any] = [*before[:6], list(before[6])]
            modes[3] &= ~termios.ICANON
            modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
            termios.tcsetattr(descriptor, termios.TCSADRAIN, modes)
            held.callback(termios.tcsetattr, descriptor, termios.TCSADRAIN, before)
            if marks_pastes():
                held.callback(write, UNMARKED)
                write(MARKED)
            atexit.register(held.close)


def marks_pastes() -> bool:
    """Whether terminal and line editor understand marks around pasted text."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        import readline
    except ImportError:
        return False
    return "libedit" not in (readline.__doc__ or "")


def write(code: str) -> None:
    """Send a code to the terminal."""
    with suppress(OSError):
        print(code, end="", flush=True)


def typed_messages(ends: Callable[[str], bool]) -> Iterator[str]:
    """Yield what is typed at a prompt; lines that arrive together are one message.

    A line for which `ends` is true, such as a command, is a message of its own.
    """
    marks = marks_pastes()
    if marks:
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    waiting: str | None = None
    while True:
        if waiting is not None:
            lines, waiting = [waiting], None
        else:
            try:
                lines = [input(PROMPT)]
            except EOFError:
                return
        while not ends(lines[0]) and is_waiting():
            try:
                line = input()
            except EOFError:
                break
            if ends(line):
                waiting = line
                break
            lines.append(line)
        if marks:
            write(MARKED)  # the line editor took it back
        yield "\n".join(lines).strip("\r\n")


def is_waiting() -> bool:
    """Whether more was typed already."""
    from select import select

    try:
        return bool(select([sys.stdin], [], [], PAUSE)[0])
    except OSError:  # Windows cannot tell
        return False
