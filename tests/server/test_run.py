"""A server process on a real port: official clients, disconnects, signals, invalid bytes."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from asking import PAIRS, chat, text_of
from outpace.server.run import MAX_HEADER_BYTES
from running import Process, ended, serving, stream_to
from shown import ROOT

OLD = ROOT / ".venv" / "openai2"


@pytest.fixture(scope="module")
def zoo() -> Iterator[Process]:
    """A server of the zoo, which must exit cleanly."""
    with serving("--drain-seconds", "5") as process:
        yield process
        assert process.end() == 0
        told = "".join(process.log)
        assert "Traceback" not in told, told


@pytest.fixture(scope="module")
def aux() -> Iterator[Process]:
    """A server with one small model, which must exit cleanly."""
    with serving("tiny-aux", "--cache-gib", "0.1") as process:
        yield process
        assert process.end() == 0


@pytest.mark.nightly
def test_prefixes_are_written_until_the_server_has_ended(tmp_path: Path) -> None:
    words = "tiny-aux", "--cache-gib", "0.1", "--prefix-dir", str(tmp_path)
    body, found = chat(max_tokens=4), []
    for _ in range(2):
        with serving(*words) as process:
            usage = httpx2.post(f"{process.url}/v1/chat/completions", json=body).json()["usage"]
            assert process.end() == 0
        found.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert found[0] == 0 < 32 <= found[1]
    assert not [*tmp_path.glob("*.new")]


LONG = chat(max_tokens=400, ignore_eos=True, model="tiny-ar")


@pytest.mark.nightly
@pytest.mark.parametrize("release", [2, 3])
def test_releases_of_the_official_client_are_served(zoo: Process, release: int) -> None:
    env = dict(os.environ)
    if release == 2:
        if not OLD.exists():
            pytest.skip("no second release of the client: make .venv/nightly")
        env["PYTHONPATH"] = str(OLD)
    command = [sys.executable, str(ROOT / "tests/server/conformance.py"), zoo.url]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    *pairs, last = done.stdout.splitlines()
    assert last.startswith(f"openai {release}.")
    assert {*pairs} >= {" ".join(pair) for pair in PAIRS}


@pytest.mark.nightly
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_pages(zoo: Process, stream: bool) -> None:
    with httpx2.Client() as client, pytest.raises(httpx2.TimeoutException):
        path = f"{zoo.url}/v1/chat/completions"
        with client.stream("POST", path, json=LONG | {"stream": stream}, timeout=0.3) as got:
            for number, _ in enumerate(got.iter_lines()):
                if number > 4:
                    raise httpx2.ReadTimeout("enough")
    assert ended(zoo) < 2


LARGE = {
    "one": lambda size: b"x: " + b"y" * (size - 5) + b"\r\n",
    "many": lambda size: b"x: y\r\n" * (size // 6),
    "address": lambda size: b"",
}
"""Headers of this many bytes."""


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("piece", [2**20, 5000])
def test_headers_are_limited(aux: Process, shape: str, piece: int) -> None:
    for size in (1000, MAX_HEADER_BYTES - 100, MAX_HEADER_BYTES + 100, 130_000, 2**20):
        path = b"/health?" + b"y" * (size if shape == "address" else 0)
        head = b"GET %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" % path
        answer = aux.raw(head + LARGE[shape](size - 50) + b"\r\n", piece=piece)
        status = b"431" if size > MAX_HEADER_BYTES else b"200"
        assert answer.startswith(b"HTTP/1.1 %s " % status) or (not answer and size == 2**20)
    assert httpx2.get(f"{aux.url}/health").status_code == 200


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_client_gets_its_answer(aux: Process, version: bytes, stream: bool) -> None:
    body = chat(model="tiny-aux", seed=3, stream=stream)
    url = f"{aux.url}/v1/chat/completions"
    wanted = told(httpx2.post(url, json=body, timeout=30).content, stream)
    data = posting(body, "chat/completions").replace(b"HTTP/1.1", b"HTTP/" + version)
    answer = aux.raw(data, half=True)
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" in head
    if stream:
        lines = rest.split(b"\r\n")
        rest = b"".join(lines[1::2])
        assert [int(size, 16) for size in lines[:-1:2]] == [*map(len, lines[1::2])]
    assert told(rest, stream) == wanted


def told(body: bytes, stream: bool) -> str:
    if stream:
        return said(body.decode().replace(":\n\n", ""))
    return json.loads(body)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "data",
    [
        *(b"\x16\x03\x01", b"GET\r\n\r\n", b"\x00" * 100, b"PRI * HTTP/2.0\r\n\r\n"),
        *(b"GET /health HTTP/1.1", b"GET /health HTTP/1.0" + b"\r\nhost: localhost" * 2),
    ],
)
def test_invalid_http_is_rejected(aux: Process, data: bytes) -> None:
    answer = aux.raw(data + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"type": "invalid_request_error"' in answer


def test_smuggled_requests_are_rejected(aux: Process) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"
    for more in (b"content-length: 6\r\n", b"transfer-encoding: chunked\r\n"):
        assert aux.raw(head + more + b"\r\n0\r\n\r\n").startswith(b"HTTP/1.1 400 ")


@pytest.mark.nightly
def test_slow_client_is_disconnected(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(
        "[server]\nread_seconds = 0.5\n[models.x]\npath = 'tiny-aux'\ncache_gib = 0.1\n"
    )
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    with serving("--config", str(tmp_path / "x.toml")) as process:
        for data in (b"", b"G", head, head + b"content-length: 5\r\n\r\n1"):
            answer = process.raw(data)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"type": "invalid_request_error"' in answer


def posting(body: dict[str, Any], path: str = "completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def posted(process: Process, bodies: list[dict[str, Any]]) -> list[Any]:
    limits = httpx2.Limits(max_connections=None)
    url = f"{process.url}/v1/chat/completions"
    async with httpx2.AsyncClient(timeout=60, limits=limits) as client:
        return await asyncio.gather(*(client.post(url, json=body) for body in bodies))


@pytest.mark.nightly
def test_concurrent_streams_equal_single_ones(zoo: Process) -> None:
    bodies = [
        chat(model=model, stream=True, max_tokens=24, seed=seed, outpace={"method": method})
        for model, method in PAIRS
        for seed in range(4)
    ]
    together = asyncio.run(posted(zoo, bodies))
    for body, response in zip(bodies[::3], together[::3], strict=True):
        (alone,) = asyncio.run(posted(zoo, [body]))
        assert said(response.text) == said(alone.text)
    ended(zoo)


def said(text: str) -> str:
    *lines, last = text.strip().split("\n\n")
    assert last == "data: [DONE]"
    chunks = [line.removeprefix("data: ") for line in lines if line != ": ping"]
    return text_of(list(map(json.loads, chunks)))


@pytest.mark.nightly
def test_excess_requests_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(
        "[server]\nmax_waiting = 4\n[models.x]\npath = 'tiny-aux'\nmax_sequences = 4\n"
    )
    with serving("--config", str(tmp_path / "x.toml")) as process:
        body = chat(model="x", max_tokens=100, ignore_eos=True)
        statuses = [each.status_code for each in asyncio.run(posted(process, [body] * 100))]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 8
        ended(process)
        for bodies in ([body | {"n": 8}] * 2, [body | {"n": 8}]):
            statuses = [each.status_code for each in asyncio.run(posted(process, bodies))]
            assert sorted(statuses) == [200, 429][: len(bodies)]
            ended(process)


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [20, 0])
def test_first_signal_drains(seconds: int) -> None:
    with serving("tiny-aux", "--drain-seconds", str(seconds)) as process:
        lines: list[str] = []
        body = chat(model="tiny-aux", stream=True, max_tokens=450, ignore_eos=True, n=4)
        reader = stream_to(process, lines, body)
        process.process.send_signal(signal.SIGTERM)
        if seconds:
            time.sleep(0.2)
            url = f"{process.url}/v1/chat/completions"
            assert httpx2.post(url, json=chat(model="tiny-aux")).status_code == 503
        reader.join()
        if seconds:
            assert lines[-1] == "data: [DONE]"
        else:
            error = json.loads(lines[-1].removeprefix("data: "))["error"]
            assert error["type"] == "unavailable_error"
        assert process.process.wait(10) == 0


STUCK = """
import sys, time
from outpace.api.text import TextCodec
from outpace.cli.main import main
TextCodec.encode = lambda *args, **options: {forever}
main(["serve", "tiny-aux", "--port", "0", "--drain-seconds", "1"])
"""


@pytest.mark.nightly
@pytest.mark.parametrize("forever", ["time.sleep(1e6)", "all(True for _ in iter(int, 1))"])
def test_a_thread_that_never_ends_does_not_keep_the_server(forever: str) -> None:
    with serving(code=STUCK.format(forever=forever)) as process, httpx2.Client() as client:
        with pytest.raises(httpx2.TimeoutException):
            body = chat(model="tiny-aux")
            client.post(f"{process.url}/v1/chat/completions", json=body, timeout=1)
        assert process.end() == 0


@pytest.mark.nightly
def test_full_disk_is_no_failure() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "outpace", "serve", "tiny-aux", "--port", str(port)]
    with open("/dev/full", "w") as full, subprocess.Popen(command, stdout=full, stderr=full) as own:
        began, answer = time.monotonic(), None
        while answer is None and time.monotonic() < began + 60:
            with suppress(httpx2.TransportError):
                answer = httpx2.get(f"http://127.0.0.1:{port}/ready", timeout=20)
        own.terminate()
        assert own.wait(20) == 0 and answer is not None and answer.status_code == 200


@pytest.mark.nightly
def test_second_signal_exits_at_once() -> None:
    with serving("tiny-aux", "--drain-seconds", "60") as process:
        body = chat(model="tiny-aux", stream=True, max_tokens=450, ignore_eos=True, n=8)
        stream_to(process, [], body)
        process.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(5) == 0
