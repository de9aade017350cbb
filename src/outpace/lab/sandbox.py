"""Run model-written code in a separate process that can only compute."""

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

JAIL_SCRIPT = Path(__file__).with_name("jail.py")
MAX_VERDICT_BYTES = 65536
"""Maximum bytes read of a verdict. A process that writes more blocks until its time is up."""

MAX_SECONDS, MAX_MEMORY = 10.0, 1 << 30
"""Maximum wall time of a program, and maximum bytes of its memory."""

MAX_REASON_CHARACTERS = 200
"""Maximum number of characters of a reason."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a program ran to its end, and otherwise the reason in one line."""

    passed: bool
    reason: str = ""


def run_sandboxed(program: str) -> Verdict:
    """Run a Python program; it passes only if it exits normally without an exception.

    It has no network, child processes, writable files, environment or input. It can read what its
    user can read.
    """
    check_sandbox()
    return execute_program(program)


@cache
def check_sandbox() -> None:
    """Raise `OSError` if programs cannot be sandboxed here; needs Linux with seccomp."""
    probe = "import socket\nsocket.socket()"
    verdict = execute_program(probe) if sys.platform == "linux" else Verdict(False, sys.platform)
    if not verdict.reason.startswith("PermissionError"):
        raise OSError(
            "model-written code needs a kernel that can block network, files and processes "
            f"(seccomp, on x86_64 or aarch64); here: {verdict.reason or 'not blocked'}"
        )


def execute_program(program: str) -> Verdict:
    token = secrets.token_hex(16)
    job = {
        "program": program,
        "token": token,
        "parent": os.getpid(),
        "seconds": MAX_SECONDS,
        "memory": MAX_MEMORY,
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", str(JAIL_SCRIPT)],
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
            send_job(process, json.dumps(job).encode())
            process.wait(MAX_SECONDS)
        except subprocess.TimeoutExpired:
            return Verdict(False, f"still running after {MAX_SECONDS:g} seconds")
        finally:
            process.kill()
            process.wait()
        return parse_verdict(
            os.read(process.stdout.fileno(), MAX_VERDICT_BYTES), token, process.returncode
        )


def send_job(process: subprocess.Popen[bytes], job: bytes) -> None:
    """Send the job. A process that exits before reading it is judged by its exit status."""
    assert process.stdin is not None
    try:
        process.stdin.write(job)
        process.stdin.close()
    except BrokenPipeError:
        pass


def parse_verdict(output: bytes, token: str, status: int) -> Verdict:
    try:
        verdict = json.loads(output)
    except ValueError:
        verdict = None
    if not isinstance(verdict, dict) or verdict.get("token") != token:
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return Verdict(False, f"exited {how} before the end of the program")
    raised = verdict.get("raised", "no verdict")
    return Verdict(raised is None, "" if raised is None else printable_line(str(raised)))


def printable_line(text: str) -> str:
    characters = (c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return "".join(characters)[:MAX_REASON_CHARACTERS]
