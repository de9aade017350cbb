"""Programs that prepare their process before they start."""

import sys


def prepared(code: str, *words: str) -> list[str]:
    """Return a command that runs `code` and then becomes Python with these words.

    Unlike `preexec_fn`, this does not fork the tests' own process, which may be too large.
    """
    become = "import os, sys\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    return [sys.executable, "-c", f"{code}\n{become}", *words]
