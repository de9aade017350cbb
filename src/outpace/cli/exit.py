"""Exit statuses, and the one-line error message of a command.

It imports only modules that Python has already loaded, since Ctrl-C prints a traceback until `main`
runs.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import NoReturn

FAILED, INTERRUPTED, TERMINATED = 1, 130, 143
"""Exit statuses: an error not caused by the user, Ctrl-C, and SIGTERM."""


def exit_with_error(message: str, status: int = 2) -> NoReturn:
    """Print one line to standard error, with control characters escaped, and exit."""
    line = " ".join(message.split())
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    print(f"outpace: {''.join(shown)}", file=sys.stderr)
    sys.exit(status)
