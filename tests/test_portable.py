"""Nothing that only POSIX has is needed to import the package, to decode, or to keep answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MASKED = """
import importlib, json, os, pkgutil, signal, sys, types

import outpace

POSIX = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "readline", "syslog")
SIGNALS = ("pthread_sigmask", "pthread_kill", "sigwait", "setitimer", "SIGKILL", "SIGHUP",
           "SIGUSR1", "SIGALRM", "SIGSTOP", "SIGTSTP", "SIGCONT", "SIGWINCH")


def load(names):
    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


every = [module.name for module in pkgutil.walk_packages(outpace.__path__, "outpace.")]
# A program, a library, and what lm_eval registers once.
apart = ("outpace.__main__", "outpace._compiled", "outpace.evaluation.harness")
names = sys.argv[3:] or [name for name in every if name not in apart]
before = load(names)  # loads what others have made; some of it may not be installed here
for name in [name for name in sys.modules if name.split(".")[0] == "outpace"]:
    del sys.modules[name]
for name in POSIX:
    sys.modules[name] = None
for name in SIGNALS:
    delattr(signal, name)
del os.getloadavg
import outpace

print(json.dumps([before, load(names)]))
"""

USED = """
import pathlib, types

held = set()


def locking(descriptor, mode, size):
    key = os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR), mode, size
    if key in held:
        raise PermissionError(13, "Permission denied")
    held.add(key)


sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
from outpace import LLM
from outpace.api.answers import answer_file, open_for_append
from outpace.provenance import provenance_record

source, target = sys.argv[1:3]
with open(source, "w") as file:
    file.write('{"prompt": "Count from 12 by 4 up to 99."}\\n')
found = [answer_file(LLM("tiny-ar"), source, target, max_tokens=8)]
found += [provenance_record()["load"], len(open(target).readlines())]
try:
    with open_for_append(pathlib.Path(target)):
        pass
except ValueError as error:
    found.append(str(error))
print(json.dumps(found))
"""


def printed(code: str, *words: str) -> str:
    """What a program prints."""
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.nightly
def test_every_module_is_imported_without_posix() -> None:
    before, after = json.loads(printed(MASKED))
    assert after == before


@pytest.mark.nightly
def test_answers_are_kept_without_posix(tmp_path: Path) -> None:
    source, target = str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")
    code = MASKED.partition("print(json")[0] + USED
    needed = [f"outpace.{name}" for name in ("answers", "provenance", "evaluation.sandbox")]
    count, load, lines, refused = json.loads(printed(code, source, target, *needed))
    assert (count, load, lines) == (1, [], 1)
    assert refused == f"another run is writing to {target}; give another output"
