"""Runs code that a model wrote in a process of its own, which can compute and nothing else."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

JAIL = Path(__file__).with_name("jail.py")
LONGEST = 65536
"""Bytes that are read of a verdict; a process that writes more waits until its time is up."""

REASON = 200
"""Characters of a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use: seconds of the clock, and bytes of memory."""

    seconds: float = 10.0
    memory: int = 1 << 30

    def __post_init__(self) -> None:
        """Raise `ValueError` for limits under which no program could run."""
        if not 0 < self.seconds < 3600:
            raise ValueError(f"seconds must lie between 0 and 3600, not {self.seconds}")
        if self.memory < 1 << 27:
            raise ValueError(f"memory must be at least {1 << 27} bytes, not {self.memory}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a program ran to its end, and else what kept it from that, in one line."""

    passed: bool
    reason: str = ""


def run(program: str, limits: Limits | None = None) -> Verdict:
    """Run a program of Python; passed only where it ends by itself and raises nothing.

    It has no network, no process beside it, no file to write, no environment and no input, and
    ends after the limits. It can read what its user can read. Raises `OSError` where this
    machine cannot hold it: see `needed`.
    """
    needed()
    return execute(program, limits or Limits())


@cache
def needed() -> None:
    """Raise `OSError` where a program cannot be held here, which takes Linux and its seccomp."""
    probe = "import socket\nsocket.socket()"
    verdict = execute(probe, Limits()) if sys.platform == "linux" else Verdict(False, sys.platform)
    if not verdict.reason.startswith("PermissionError"):
        raise OSError(
            "code of a model is run only where the kernel can keep it from network, files and "
            f"processes (seccomp, on x86_64 or aarch64); here: {verdict.reason or 'it cannot'}"
        )


def execute(program: str, limits: Limits) -> Verdict:
    """One process for one program."""
    token = secrets.token_hex(16)
    job = {
        "program": program,
        "token": token,
        "parent": os.getpid(),
        "seconds": limits.seconds,
        "memory": limits.memory,
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", str(JAIL)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        try:
            send(process, json.dumps(job).encode())
            process.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            return Verdict(False, f"still running after {limits.seconds:g} seconds")
        finally:
            process.kill()
            process.wait()
        return judged(os.read(process.stdout.fileno(), LONGEST), token, process.returncode)


def send(process: subprocess.Popen[bytes], job: bytes) -> None:
    """Hand over the job; a process that ended before it read all of it is judged by its end."""
    assert process.stdin is not None
    try:
        process.stdin.write(job)
        process.stdin.close()
    except BrokenPipeError:
        pass


def judged(written: bytes, token: str, status: int) -> Verdict:
    """What the process said of its program; nothing, where it ended otherwise."""
    try:
        said = json.loads(written)
    except ValueError:
        said = None
    if not isinstance(said, dict) or said.get("token") != token:
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return Verdict(False, f"ended {how} before its end")
    raised = said.get("raised", "no verdict")
    return Verdict(raised is None, "" if raised is None else one_line(str(raised)))


def one_line(text: str) -> str:
    """A text in one line of at most `REASON` characters, all of which can be printed."""
    shown = (c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return "".join(shown)[:REASON]
