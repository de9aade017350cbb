"""Programs that start a Ray of their own, and the processes of its actors."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from running import finish

SECONDS = 500.0
"""Longest wait for anything."""


class Program:
    """An `outpace` command that is running."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outpace", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self.reader = Thread(target=lambda: self.log.extend(self.process.stderr or ()))
        self.reader.start()

    def told(self) -> str:
        """What it has written on standard error."""
        return "".join(self.log)

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for something to become true while it runs."""
        began = time.monotonic()
        while not true():
            assert self.process.poll() is None, self.told()
            assert time.monotonic() - began < SECONDS, self.told()
            time.sleep(0.1)

    def actors(self, title: str) -> list[int]:
        """Processes of its Ray whose titles begin so."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                named = (folder / "cmdline").read_bytes().startswith(f"ray::{title}".encode())
            except OSError:  # it has just ended
                continue
            if named and self.process.pid in ancestors(int(folder.name)):
                found.append(int(folder.name))
        return found

    def kill_one(self, title: str) -> None:
        """End one of them, without a chance to say a word."""
        os.kill(self.actors(title)[0], signal.SIGKILL)


def ancestors(process: int) -> Iterator[int]:
    while process > 1:
        try:
            stat = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return
        process = int(stat.rpartition(")")[2].split()[1])
        yield process


@contextmanager
def running(*words: str) -> Iterator[Program]:
    """A command that is gone afterwards, whatever happens; so is its Ray."""
    program = Program(*words)
    try:
        yield program
    finally:
        finish(program.process, program.reader)
