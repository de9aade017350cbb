"""The entry of the command line: one line for whatever a user did wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

INTERRUPTED = 130


def main(args: Sequence[str] | None = None) -> None:
    """Run a command; bad input is one line on standard error and exit status 2."""
    words = list(sys.argv[1:] if args is None else args) or ["--help"]
    try:
        from outpace.cli.app import run  # here, so that Ctrl-C meanwhile is one line as well

        status = run(words)
        print(end="", flush=True)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except (ValueError, OSError) as error:
        fail(f"{'standard output: ' if is_full() else ''}{error}")
    if status == INTERRUPTED:
        fail("interrupted", INTERRUPTED)
    sys.exit(status)


def fail(message: str, status: int = 2) -> NoReturn:
    """End with one line on standard error, in which nothing moves the cursor."""
    line = " ".join(message.split())
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    print(f"outpace: {''.join(shown)}", file=sys.stderr)
    sys.exit(status)


def is_full() -> bool:
    """Whether standard output takes no more, as on a full disk; what it still holds is dropped."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
