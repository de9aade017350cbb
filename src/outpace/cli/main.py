"""Entry point of the command line, which prints user errors as one line.

It imports only modules that Python has already loaded: until `main` runs, Ctrl-C prints a
traceback.
"""

from __future__ import annotations

import os
import sys

from outpace.cli.terminal import INTERRUPTED, TERMINATED, exit_with_error

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> None:
    """Run a command; user errors print one line to standard error and exit with status 2."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda info: (
        repeat_interrupt() if info.exc_type is KeyboardInterrupt else hook(info)
    )
    try:
        from outpace.cli.app import run_command

        status = run_command(list(sys.argv[1:] if args is None else args) or ["--help"])
        print(end="", flush=True)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except SystemExit as ended:
        if ended.code == TERMINATED:
            exit_with_error("terminated", TERMINATED)
        raise
    except (ValueError, OSError) as error:
        exit_with_error(f"{'standard output: ' if is_stdout_full() else ''}{error}")
    finally:
        sys.unraisablehook = hook
    if status == INTERRUPTED:
        exec("")  # otherwise Python dies by the signal if it came inside exec, as in dataclasses
        exit_with_error("interrupted", INTERRUPTED)
    sys.exit(status)


def repeat_interrupt() -> None:
    """Repeat a Ctrl-C that arrived where it could not be raised, such as in an import."""
    from _thread import interrupt_main
    from threading import Timer

    Timer(0.01, interrupt_main).start()


def is_stdout_full() -> bool:
    """Return whether standard output cannot be written, as on a full disk, and drop its buffer."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
