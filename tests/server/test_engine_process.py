"""The engine process: same answers as in-process, and coupled lifetimes."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from asking import chat
from running import Process, ended, serving, stream_to

pytestmark = pytest.mark.nightly

LONG = {"model": "tiny-aux", "stream": True, "max_tokens": 450, "ignore_eos": True}


@pytest.fixture(scope="module")
def aux() -> Iterator[Process]:
    with serving("tiny-aux", "--cache-gib", "0.1") as process:
        yield process


@pytest.fixture
def own() -> Iterator[Process]:
    """A server that a test may break."""
    with serving("tiny-aux", "--cache-gib", "0.1") as process:
        yield process


@pytest.fixture(scope="module")
def zoo() -> Iterator[Process]:
    with serving() as process:
        yield process


def engine_of(process: Process) -> int:
    number = process.process.pid
    (engine,) = Path(f"/proc/{number}/task/{number}/children").read_text().split()
    return int(engine)


def gone(number: int, seconds: float = 5) -> bool:
    """Whether a process exits within the time limit."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            status = Path(f"/proc/{number}/stat").read_text()
        except OSError:
            return True
        if status.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def plain(text: str) -> Any:
    """An answer without its varying parts."""
    text = re.sub(r'"(seconds|tokens_per_second|created)":[-\d.e]+', r'"\1":0', text)
    return re.sub(r'"id":"[^"]+"', '"id":""', text)


def merged(text: str) -> tuple[list[Any], list[Any]]:
    """Provisional parts of a stream and everything else, independent of chunking."""
    log_lines: dict[str, Any] = {"text": "", "steps": [], "scores": []}
    canvases = []
    *lines, last = plain(text).strip().split("\n\n")
    assert last == "data: [DONE]"
    for line in lines:
        event = json.loads(line.removeprefix("data: "))
        extra = event.get("outpace") or {}
        log_lines["steps"] += extra.get("steps", [])
        canvases += [extra["canvas"]] if "canvas" in extra else []
        for choice in event["choices"]:
            log_lines["text"] += choice["delta"].get("content") or ""
            log_lines["scores"] += (choice["logprobs"] or {}).get("content", [])
    return canvases, [*log_lines.items(), lines[-1]]


METHODS = [
    ("tiny-ar", "autoregressive", {}),
    # `serve` decodes with the draft by default, and then with copies.
    ("tiny-ar", "dflash", {"options": {"tokens": 8, "lookup": False}}),
    ("tiny-dream", "apd", {}),
    ("tiny-dream", "fast_dllm", {"provisional": True}),
    ("tiny-wedlm", "wedlm", {"provisional": True}),
]


@pytest.mark.parametrize(("model", "method", "extra"), METHODS)
def test_answers_equal_in_process(
    zoo: Process, client: TestClient, model: str, method: str, extra: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"model": model, "max_tokens": 24, "seed": 5, "temperature": 0.7}
    # A separate prompt, since the trace shows prefix-cache hits.
    prompt = f"Nine cats and {len(method)} dogs. How many?"
    options = {"options": extra.get("options", {}), "method": method, "trace": True}
    body = chat(prompt, **asked, logprobs=True, outpace=options)
    path = "/v1/chat/completions"
    theirs = httpx2.post(f"{zoo.url}{path}", json=body, timeout=30)
    assert theirs.status_code == 200
    assert plain(theirs.text) == plain(client.post(path, json=body).text)
    body |= {"stream": True, "outpace": body["outpace"] | extra}
    theirs = httpx2.post(f"{zoo.url}{path}", json=body, timeout=30)
    shown, rest = merged(theirs.text)
    here, ours = merged(client.post(path, json=body).text)
    assert rest == ours
    assert bool(shown) == bool(here) == ("provisional" in extra)


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 10**6},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {"structured_outputs": {"regex": "(("}},
        {"messages": [{"role": "user", "content": "x" * 2**20}]},
        {"chat_template_kwargs": {"none": 1}},
        {"structured_outputs": {"json": '{"items":' * 700 + "{}" + "}" * 700}},
        {"presence_penalty": 1.5, "logit_bias": {"5": -100}},
    ],
)
def test_errors_equal_in_process(zoo: Process, client: TestClient, more: dict[str, Any]) -> None:
    # Not the default method, whose number of forwards depends on time.
    body = chat(**{"seed": 1, "outpace": {"method": "autoregressive"}, **more})
    path = "/v1/chat/completions"
    ours, theirs = client.post(path, json=body), httpx2.post(f"{zoo.url}{path}", json=body)
    assert (theirs.status_code, plain(theirs.text)) == (ours.status_code, plain(ours.text))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_server_exits_with_engine_process(own: Process, number: int) -> None:
    lines: list[str] = []
    reader = stream_to(own, lines, chat(**LONG))
    os.kill(engine_of(own), number)
    reader.join()
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert own.process.wait(10) == 1
    own.reader.join()
    assert signal.Signals(number).name in "".join(own.log)


def test_stopped_engine_counts_as_hanging() -> None:
    with serving("tiny-aux", "--cache-gib", "0.1", "--step-seconds", "1.5") as process:
        engine = engine_of(process)
        lines: list[str] = []
        reader = stream_to(process, lines, chat(**LONG))
        os.kill(engine, signal.SIGSTOP)
        reader.join()
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert process.process.wait(15) == 1
        assert gone(engine)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_engine_process_exits_with_server(own: Process, number: int) -> None:
    engine = engine_of(own)
    reader = stream_to(own, [], chat(**LONG))
    own.process.send_signal(number)
    own.process.wait(20)
    reader.join()
    assert gone(engine)


def test_many_disconnects_leave_nothing(aux: Process) -> None:
    body = json.dumps(chat(**LONG)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    for number in range(500):
        with socket.create_connection(("127.0.0.1", aux.port), timeout=5) as own:
            own.sendall(head % len(body) + body)
            time.sleep(0.001 * (number % 7))
    ended(aux, 20)
    response = httpx2.get(f"{aux.url}/metrics").text
    assert 'outpace_running{model="tiny-aux"} 0.0' in response
    assert 'outpace_waiting{model="tiny-aux"} 0.0' in response


def test_stalled_client_delays_no_other(aux: Process) -> None:
    body = json.dumps(chat(**{**LONG, "n": 8, "outpace": {"trace": True}})).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        own.connect(("127.0.0.1", aux.port))
        own.sendall(head % len(body) + body)
        lines: list[str] = []
        reader: Thread = stream_to(aux, lines, chat(**LONG))
        reader.join(30)
        assert lines[-1] == "data: [DONE]"
    ended(aux, 20)


def test_method_of_a_file_is_served() -> None:
    name = f"{Path(__file__).parents[2]}/examples/own_method.py:PromptLookup"
    with serving("tiny-aux", "--method", name, "--tokens", "3") as process:
        url, body = f"{process.url}/v1/chat/completions", chat(model="tiny-aux", temperature=0)
        reply = httpx2.post(url, json=body).json()
        assert reply["outpace"]["method"] == "PromptLookup(tokens=3, match=2)"
        plain = httpx2.post(url, json=body | {"outpace": {"method": "autoregressive"}}).json()
        assert plain["choices"] == reply["choices"]
        unnamed = body | {"outpace": {"method": f"{name[:-2]}"}}
        assert httpx2.post(url, json=unnamed).status_code == 400
