"""Imports without POSIX modules."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import asyncio, importlib, pkgutil, signal, sys
import torch, transformers  # which are not ours
for name in ("fcntl", "resource", "termios", "pwd", "grp", "uvloop"):
    sys.modules[name] = None
for name in [*vars(signal)]:
    if name.startswith(("pthread_", "sigwait", "sigpending", "siginterrupt", "setitimer")):
        delattr(signal, name)
for name in ("KILL", "HUP", "USR1", "USR2", "CHLD", "ALRM", "STOP", "CONT"):
    delattr(signal, f"SIG{name}")
for name in ("BLOCK", "UNBLOCK", "SETMASK"):
    delattr(signal, f"SIG_{name}")
del asyncio.AbstractEventLoop.add_signal_handler
import outpace.server
modules = [each.name for each in pkgutil.iter_modules(outpace.server.__path__)]
for name in modules:
    importlib.import_module(f"outpace.server.{name}")
print(len(modules))
"""


@pytest.mark.nightly
def test_every_module_is_imported_without_posix() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
