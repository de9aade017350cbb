"""Sandbox: model-written code can compute and nothing else."""

import ast
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outpace.lab import jail, sandbox
from outpace.lab.sandbox import run_sandboxed
from prepared import prepared
from source import MODULES

PROBES = (335, 336)
"""System calls of the kernel's own probes, which bypass filters and are useless to a program."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give programs three seconds."""
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 3)


SECURITY_BITS, NO_ROOT = 28, 3
"""`prctl` options: user 0 gets no capabilities, irrevocably."""
WITHOUT_RIGHTS = f"""
import os
from outpace.lab.jail import call_prctl
if os.geteuid() == 0:
    call_prctl({SECURITY_BITS}, {NO_ROOT})
"""

HARMLESS = {
    "arithmetic": "assert 1 + 1 == 2",
    "the library": "import collections, datetime, decimal, hashlib, heapq, itertools, json, math, "
    "random, re, statistics, string, typing\nassert random.random() < 1",
    "numpy": "import numpy\nassert numpy.ones((9, 9)).sum() == 81",
    "threads": "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
    "clocks": "import time\ntime.sleep(0.01)\nassert time.time() > 0",
    "much output": "for _ in range(10**5):\n    print('x' * 100)",
    "annotations": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'",
    "reading": "assert open('/proc/self/status').read()",
}

HARMFUL = {
    "endless loop": "while True: pass",
    "endless sleep": "import time\nwhile 1:\n  try: time.sleep(99)\n  except BaseException: pass",
    "large string": "x = 'x' * 10**12",
    "memory bomb": "x = []\nwhile True: x.append('x' * 10**6)",
    "endless recursion": "def f(): f()\nf()",
    "crash": "import ctypes\nctypes.string_at(0)",
    "threads without end": "import threading, time\nwhile True:\n"
    "  threading.Thread(target=time.sleep, args=(99,)).start()",
    "fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: raise",
    "fork bomb of a shell": "import os\nassert os.system(':(){ :|:& };:') == 0",
    "process": "import subprocess\nsubprocess.run(['true'])",
    "program": "import os\nos.execv('/bin/true', ['true'])",
    "socket": "import socket\nsocket.socket()",
    "address": "import socket\nsocket.getaddrinfo('example.org', 80)\nsocket.socket()",
    "socket of files": "import socket\nsocket.socket(socket.AF_UNIX)",
    "download": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1')",
    "signal to its parent": "import os\nos.kill(os.getppid(), 9)",
    "signal to all": "import os\nos.kill(-1, 9)",
    "higher limits": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
    "leaving": "import sys\nsys.exit(0)",
    "leaving at once": "import os\nos._exit(0)",
    "input": "input()",
    "wrong": "assert 1 + 1 == 3",
    "no Python": "this is no program",
    "a null": "x = '\0'",
    "half a character": "x = '\ud800'",
    "flooding its verdict": "import os\nwhile True: os.write(3, b'x' * 4096)",
    "a verdict of its own": "import os\nos.write(3, b'{\"raised\": null}')\nos._exit(0)",
}

WRITES = {
    "write": "open({path!r}, 'w')",
    "append": "open({path!r}, 'a')",
    "create": "import os\nos.open({path!r}, os.O_CREAT)",
    "truncate": "import os\nos.truncate({old!r}, 0)",
    "truncate on opening": "import os\nos.open({old!r}, os.O_RDONLY | os.O_TRUNC)",
    "folder": "import os\nos.mkdir({path!r})",
    "link": "import os\nos.symlink('x', {path!r})",
    "rename": "import os\nos.rename({old!r}, {path!r})",
    "remove": "import os\nos.remove({old!r})",
    "mode": "import os\nos.chmod({old!r}, 0)",
    "temporary": "import tempfile\ntempfile.TemporaryFile()",
    "pipe": "import os\nos.mkfifo({path!r})",
    "itself": "open('/proc/self/mem', 'r+b')",
}


@pytest.mark.parametrize("program", HARMLESS.values(), ids=HARMLESS)
def test_computation_passes(program: str) -> None:
    assert run_sandboxed(program) == sandbox.Verdict(True)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (number % 3 != 2))
        for number, name in enumerate(HARMFUL)
    ],
)
@pytest.mark.usefixtures("short")
def test_forbidden_actions_fail(name: str) -> None:
    verdict = run_sandboxed(HARMFUL[name])
    assert not verdict.passed and verdict.reason and len(verdict.reason) < 300
    assert not jails(os.getpid())


@pytest.mark.parametrize("program", WRITES.values(), ids=WRITES)
@pytest.mark.usefixtures("short")
def test_files_are_unchanged(program: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("old")
    old.chmod(0o600)
    assert not run_sandboxed(program.format(path=str(new), old=str(old))).passed
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert old.read_text() == "old" and old.stat().st_mode & 0o777 == 0o600


def test_root_is_not_required() -> None:
    script = """
from pathlib import Path
from outpace.lab.sandbox import run_sandboxed
assert "CapEff:\\t0000000000000000" in Path("/proc/self/status").read_text()
assert run_sandboxed("assert 1").passed
for program in ("import socket\\nsocket.socket()", "import os\\nos.fork()", "open('x', 'w')"):
    assert "not permitted" in run_sandboxed(program).reason
"""
    command = prepared(WITHOUT_RIGHTS, "-c", script)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_program_dies_with_its_parent() -> None:
    script = (
        "from outpace.lab.sandbox import run_sandboxed\n"
        "run_sandboxed('import time\\ntime.sleep(99)')"
    )
    for delay in (0, 0.01, 0.1):
        parent = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
        while not (found := jails(parent.pid)):
            assert parent.poll() is None
        time.sleep(delay)
        parent.kill()
        parent.wait()
        began = time.monotonic()
        while any(runs(pid) for pid in found):
            assert time.monotonic() - began < 60, "it lives on"
            time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def jails(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and b"jail.py" in command:
            found.append(int(path.parent.name))
    return found


def test_missing_seccomp_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    sandbox.check_sandbox.cache_clear()
    with pytest.raises(OSError, match="seccomp"):
        run_sandboxed("assert 1")
    monkeypatch.undo()
    sandbox.check_sandbox.cache_clear()
    assert run_sandboxed("assert 1").passed


def test_other_syscalls_are_blocked() -> None:
    machine = platform.machine()
    known = {
        *jail.ALLOWED_SYSCALLS[machine],
        *(call for call, _ in jail.OPEN_SYSCALLS[machine]),
        *PROBES,
    }
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for call in [*range(600), *range(2**30, 2**30 + 600)]:
    if call not in {known!r}:
        ctypes.set_errno(0)
        assert libc.syscall(ctypes.c_long(call), 0, 0, 0, 0, 0, 0) == -1, call
        assert ctypes.get_errno() in (1, 38), call
"""
    assert run_sandboxed(program) == sandbox.Verdict(True)


@pytest.mark.parametrize("flags", ["O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC"])
def test_opening_for_writing_is_blocked(flags: str) -> None:
    for more in ("0", "os.O_DIRECTORY", "os.O_CLOEXEC", "os.O_APPEND"):
        verdict = run_sandboxed(f"import os\nos.open('/', os.{flags} | {more})")
        assert verdict.reason.startswith("PermissionError"), verdict


def test_programs_run_nowhere_else() -> None:
    execute = {"exec", "eval", "compile", "system", "Popen", "run_path", "exec_module"}
    callers = {
        path
        for path, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", None)) in execute
        and not (isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "re")
    }
    assert {path for path in callers if path.startswith("lab/")} == {
        "lab/jail.py",
        "lab/sandbox.py",
    }
