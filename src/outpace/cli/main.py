"""The entry of the command line: one line for whatever a user did wrong."""

from __future__ import annotations

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
    except KeyboardInterrupt:
        status = INTERRUPTED
    except (ValueError, OSError) as error:
        fail(str(error))
    if status == INTERRUPTED:
        fail("interrupted", INTERRUPTED)
    sys.exit(status)


def fail(message: str, status: int = 2) -> NoReturn:
    """End with one line on standard error."""
    print(f"outpace: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)
