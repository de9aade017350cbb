"""Run one untrusted program in this process, which can do nothing else afterwards.

A separate script that `sandbox.py` starts with a job on standard input. It closes its
descriptors, sets resource limits, and blocks system calls with seccomp. The program can still
compute, read files and start threads.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import struct
import sys
from collections.abc import Iterator
from types import ModuleType

ALLOWED_SYSCALLS = {
    "x86_64": (
        *(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21, 24, 25, 28, 32, 35),
        *(39, 60, 63, 79, 89, 96, 97, 98, 99, 100, 102, 104, 107, 108, 131, 186, 202, 204, 217),
        *(228, 229, 230, 231, 262, 267, 269, 271, 273, 318, 324, 332, 334, 439),
    ),
    "aarch64": (
        *(17, 23, 48, 57, 61, 62, 63, 64, 65, 66, 67, 73, 78, 79, 80, 93, 94, 98, 99, 101, 113),
        *(114, 115, 123, 124, 132, 134, 135, 139, 153, 160, 163, 165, 169, 172, 174, 175, 176),
        *(177, 178, 179, 214, 215, 216, 222, 226, 233, 278, 283, 291, 293, 439),
    ),
}
"""Allowed system calls by machine: I/O on open files, memory, clocks, locks, own signals.

None of them opens a socket, starts a process or program, changes a file, sends a signal to
another process, or sets a limit.
"""

OPEN_SYSCALLS = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}
"""System calls that open a file, with the index of their flags argument."""

CLONE_SYSCALL = {"x86_64": 56, "aarch64": 220}
CLONE3_SYSCALL = 435
AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
WRITE_FLAGS = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
CLONE_THREAD_FLAG = 0x00010000
LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_ANY_BIT, RETURN_VERDICT = 0x20, 0x15, 0x45, 0x06
ALLOW_CALL, KILL_PROCESS, DENY_CALL = 0x7FFF0000, 0x80000000, 0x00050001
NOT_IMPLEMENTED = 0x00050026
"""Instructions and verdicts of the filter; `DENY_CALL` is EPERM, `NOT_IMPLEMENTED` is ENOSYS."""

SYSCALL_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16
"""Offsets of system call number, architecture and first argument in seccomp data."""

NO_NEW_PRIVILEGES_OPTION, SECCOMP_OPTION, SECCOMP_FILTER_MODE, PARENT_DEATH_SIGNAL = 38, 22, 2, 1


def filter_instructions(machine: str) -> Iterator[bytes]:
    """Yield the BPF instructions of the filter: operation, jumps if true and false, operand."""

    def encode(operation: int, operand: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", operation, yes, no, operand)

    yield encode(LOAD_WORD, ARCHITECTURE_OFFSET)
    yield encode(JUMP_IF_EQUAL, AUDIT_ARCHITECTURE[machine], yes=1)
    yield encode(RETURN_VERDICT, KILL_PROCESS)
    yield encode(LOAD_WORD, SYSCALL_OFFSET)
    for call in ALLOWED_SYSCALLS[machine]:
        yield encode(JUMP_IF_EQUAL, call, no=1)
        yield encode(RETURN_VERDICT, ALLOW_CALL)
    for call, argument in OPEN_SYSCALLS[machine]:
        yield encode(JUMP_IF_EQUAL, call, no=4)
        yield encode(LOAD_WORD, ARGUMENTS_OFFSET + 8 * argument)
        yield encode(JUMP_IF_ANY_BIT, WRITE_FLAGS, no=1)
        yield encode(RETURN_VERDICT, DENY_CALL)
        yield encode(RETURN_VERDICT, ALLOW_CALL)
    yield encode(JUMP_IF_EQUAL, CLONE_SYSCALL[machine], no=4)
    yield encode(LOAD_WORD, ARGUMENTS_OFFSET)
    yield encode(JUMP_IF_ANY_BIT, CLONE_THREAD_FLAG, no=1)
    yield encode(RETURN_VERDICT, ALLOW_CALL)
    yield encode(RETURN_VERDICT, DENY_CALL)
    # The C library tries clone3 first and falls back to clone on ENOSYS.
    yield encode(JUMP_IF_EQUAL, CLONE3_SYSCALL, no=1)
    yield encode(RETURN_VERDICT, NOT_IMPLEMENTED)
    yield encode(RETURN_VERDICT, DENY_CALL)


class FilterProgram(ctypes.Structure):
    """A BPF program: its length and instructions."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def call_prctl(*arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    padded = [*arguments, 0, 0, 0, 0][:5]
    if libc.prctl(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in padded)):
        raise OSError(ctypes.get_errno(), "prctl")


def install_filter() -> None:
    """Block all other system calls of this process, permanently."""
    code = list(filter_instructions(platform.machine()))
    program = FilterProgram(len(code), b"".join(code))
    call_prctl(NO_NEW_PRIVILEGES_OPTION, 1)
    call_prctl(SECCOMP_OPTION, SECCOMP_FILTER_MODE, ctypes.byref(program))


def set_resource_limits(seconds: float, memory: int) -> None:
    """Limit CPU time (seconds), memory (bytes), file size (none) and core dumps (none)."""
    import resource  # not available on Windows, where this file is only imported

    for resource_id, maximum in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(resource_id, (maximum, maximum))


def run_program(program: str) -> str | None:
    module = ModuleType("answer")
    sys.modules["answer"] = module
    try:
        exec(compile(program, "<answer>", "exec"), module.__dict__)
    except BaseException as error:  # including SystemExit, which counts as failure
        raised = f"{type(error).__name__}: {error}"[:200]
    else:
        return None
    module.__dict__.clear()  # free memory for writing the verdict
    return raised


def main() -> None:
    """Read the job, install the filter, run the program, and write the verdict."""
    call_prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    job = json.loads(sys.stdin.buffer.read())
    if os.getppid() != job["parent"]:  # the parent exited before the death signal was set
        return
    verdict = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    set_resource_limits(job["seconds"], job["memory"])
    install_filter()
    raised = run_program(job["program"])
    os.write(verdict, json.dumps({"token": job["token"], "raised": raised}).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
