"""The package is imported, decodes and locks files without what only POSIX has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

MASKED = """
import importlib, json, os, pathlib, pkgutil, signal, sys, types

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
apart = ("outpace.__main__", "outpace._compiled", "outpace.lab.harness")
names = [name for name in every if name not in apart]
before = load(names)  # some optional packages may not be installed
for name in [name for name in sys.modules if name.split(".")[0] == "outpace"]:
    del sys.modules[name]
for name in POSIX:
    sys.modules[name] = None
for name in SIGNALS:
    delattr(signal, name)
del os.getloadavg
held = set()


def locking(descriptor, mode, size):
    key = os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR), mode, size
    if key in held:
        raise PermissionError(13, "Permission denied")
    held.add(key)


sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
after = load(names)

from outpace import LLM
from outpace.data.answers import answer_file, open_for_append
from outpace.provenance import provenance_record

source, target = sys.argv[1:]
count = answer_file(LLM("tiny-ar"), source, target, max_tokens=8)
try:
    with open_for_append(pathlib.Path(target)):
        is_locked = False
except ValueError:
    is_locked = True
print(json.dumps([before, after, count, provenance_record()["load"], is_locked]))
"""


def test_nothing_needs_posix(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "Count from 12 by 4 up to 99."}\n')
    command = [sys.executable, "-c", MASKED, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after, *found = json.loads(done.stdout.splitlines()[-1])
    assert after == before
    assert found == [1, [], True]
    assert len(target.read_text().splitlines()) == 1
