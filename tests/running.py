"""A server on a real port, in processes of its own, for tests."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import httpx2


class Process:
    """A server and its address."""

    def __init__(self, *words: str, code: str | None = None) -> None:
        command = [sys.executable, "-m", "outpace", "serve", *words, "--port", "0"]
        command = command if code is None else [sys.executable, "-c", code]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"listening on (http://\S+):(\d+)", line):
                self.port = int(found[2])
                self.url = f"{found[1]}:{found[2]}"
                break
        else:
            raise AssertionError("".join(self.log))
        self.reader = Thread(target=lambda: self.log.extend(self.process.stderr or ()))
        self.reader.start()

    def pages(self) -> float:
        lines = httpx2.get(f"{self.url}/metrics").text.splitlines()
        used = [line for line in lines if line.startswith("outpace_cache_pages_used{")]
        assert used
        return sum(float(line.rpartition(" ")[2]) for line in used)

    def raw(self, data: bytes, *, piece: int = 2**20, half: bool = False) -> bytes:
        """What comes back for some bytes, sent in pieces, until the server hangs up.

        With `half` it is told that no more bytes come.
        """
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as own:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(ConnectionError):  # it may hang up before it has read all
                for begin in range(0, len(data), piece):
                    own.sendall(data[begin : begin + piece])
                if half:
                    own.shutdown(socket.SHUT_WR)
            answer = b""
            with suppress(ConnectionError):
                while piece := own.recv(2**16):
                    answer += piece
            return answer

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


def finish(process: subprocess.Popen[str], reader: Thread) -> None:
    """End a process, if it has not ended, and the thread that reads what it says."""
    process.kill()
    process.wait()
    reader.join()
    assert process.stderr is not None
    process.stderr.close()


@contextmanager
def serving(*words: str, code: str | None = None) -> Iterator[Process]:
    """A server that is gone afterwards, whatever happens; `code` starts another than usual."""
    process = Process(*words, code=code)
    try:
        yield process
    finally:
        finish(process.process, process.reader)


def ended(zoo: Process, seconds: float = 5) -> float:
    """Seconds until no page is held."""
    began = time.monotonic()
    while zoo.pages():
        assert time.monotonic() - began < seconds
        time.sleep(0.01)
    return time.monotonic() - began


def stream_to(process: Process, lines: list[str], body: dict[str, Any]) -> Thread:
    """Read a stream to its end in a thread, once it has begun."""

    def read() -> None:
        path = f"{process.url}/v1/chat/completions"
        begun = httpx2.stream("POST", path, json=body, timeout=30)
        with suppress(httpx2.RemoteProtocolError), begun as response:  # the server may end at once
            lines.extend(line for line in response.iter_lines() if line)

    thread = Thread(target=read)
    thread.start()
    while not process.pages():
        time.sleep(0.01)
    return thread
