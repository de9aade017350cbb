"""The entry of the command line: one line for whatever a user did wrong.

It imports nothing that Python has not loaded already: until `main` runs, Ctrl-C is a traceback.
"""

from __future__ import annotations

import os
import sys

from outpace.cli.exit import INTERRUPTED, TERMINATED, fail

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> None:
    """Run a command; bad input is one line on standard error and exit status 2."""
    shown = sys.unraisablehook
    sys.unraisablehook = lambda lost: again() if lost.exc_type is KeyboardInterrupt else shown(lost)
    try:
        from outpace.cli.app import run

        status = run(list(sys.argv[1:] if args is None else args) or ["--help"])
        print(end="", flush=True)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except SystemExit as ended:
        if ended.code == TERMINATED:
            fail("terminated", TERMINATED)
        raise
    except (ValueError, OSError) as error:
        fail(f"{'standard output: ' if is_full() else ''}{error}")
    finally:
        sys.unraisablehook = shown
    if status == INTERRUPTED:
        exec("")  # or Python would end by the signal, if it came within exec, as of a dataclass
        fail("interrupted", INTERRUPTED)
    sys.exit(status)


def again() -> None:
    """Ctrl-C that came where nothing can be raised, as where an import ends, comes once more."""
    from _thread import interrupt_main
    from threading import Timer

    Timer(0.01, interrupt_main).start()


def is_full() -> bool:
    """Whether standard output takes no more, as on a full disk; what it still holds is dropped."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
