"""Entry point of the command line, which prints user errors as one line."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from outpace.cli.terminal import (
    INTERRUPTED,
    TERMINATED,
    exit_with_error,
    open_prompt,
    show_startup_spinner,
)

LOADING_COMMANDS = "generate", "chat"
"""Commands that import PyTorch as they load a model; garbage is collected from then on."""


def main(args: Sequence[str] | None = None) -> None:
    """Run a command; user errors print one line to standard error and exit with status 2."""
    words = list(sys.argv[1:] if args is None else args) or ["--help"]
    try:
        if words[0] == "chat" and not {"-h", "--help"} & {*words}:
            open_prompt()
        # Modules and vocabularies stay. Collecting them took 5 % of the time up to the first token
        # of Qwen2.5-Coder-0.5B.
        gc.disable()
        from outpace.cli.app import load_command, open_server, run_command

        with open_server(words) as start:
            with show_startup_spinner("loading PyTorch"):
                command = load_command(words)
            if words[0] not in LOADING_COMMANDS:
                gc.freeze()
                gc.enable()
            status = run_command(command, words, start)
        if sys.stdout is not None:
            sys.stdout.flush()  # an empty text more would fail on a full device
    except KeyboardInterrupt:
        status = INTERRUPTED
    except SystemExit as ended:
        if ended.code == TERMINATED:
            exit_with_error("terminated", TERMINATED)
        raise
    except (ValueError, OSError) as error:
        exit_with_error(f"{'standard output: ' if is_stdout_full() else ''}{error}")
    finally:
        gc.enable()
        gc.unfreeze()
    if status == INTERRUPTED:
        exit_with_error("interrupted", INTERRUPTED)
    sys.exit(status)


def is_stdout_full() -> bool:
    """Return whether standard output cannot be written, as on a full disk, and drop its buffer."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
