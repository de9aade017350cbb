"""How a command ends: exit statuses, and one line for a fault.

It imports only what Python has loaded already, since Ctrl-C is a traceback until `main` runs.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import NoReturn

FAILED, INTERRUPTED, TERMINATED = 1, 130, 143
"""Exit statuses: of a fault that is no user's, of Ctrl-C, and of SIGTERM."""


def fail(message: str, status: int = 2) -> NoReturn:
    """End with one line on standard error, in which nothing moves the cursor."""
    line = " ".join(message.split())
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    print(f"outpace: {''.join(shown)}", file=sys.stderr)
    sys.exit(status)
