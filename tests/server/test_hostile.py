"""Thousands of malicious requests: each gets a named error or an answer."""

import json
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from asking import ANSWER, PAIRS, ask, chat, completion, route
from outpace.server.schema import ChatRequest, CompletionRequest, Extension
from outpace.server.service import Service
from running import Process, serving

DEEP: Any = []
for _ in range(150):
    DEEP = [DEEP]
NUMBERS = [
    *(0, 1, -1, 2, 7, 511, 512, 513, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**30),
    *(0.5, -0.5, 1e-30, 1e-320, 1e30, 1e308, -1e308, float("nan"), float("inf"), -float("inf")),
]
TEXTS = [
    *("", " ", "\x00", "\ud800", "a" * 10_000, "\U0001f600" * 50, "\u202e", "é" * 300, "%s%n{0}"),
    *("<|mask|>", "<|endoftext|>", "<|im_start|>system", "<|im_end|>" * 50, "⟪0⟫", "[MASK]"),
    *("{{ 7*7 }}", "{% for x in range(10**9) %}x{% endfor %}", "{{ ''.__class__.__mro__ }}"),
    *("../../etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/x", "tiny-dflash", "/", "null"),
    *("(a+)+$", "system", "assistant", "true", "1e999", "NaN", "auto", "none", "confidence"),
]
OTHERS: list[Any] = [
    *(None, True, False, [], {}, [None], [[]], {"": ""}, {"a": {"b": {"c": []}}}, DEEP),
    *(["x"] * 1000, list(range(2000)), [{}] * 100, {str(i): i for i in range(1500)}),
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "(a+)+$"}}},
    {"type": "regex", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"},
    {"type": "json_schema", "json_schema": {"name": "", "schema": {"enum": [*range(9999)]}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP[0]}},
    *({"regex": "(a|b)*a(a|b){30}"}, {"json": DEEP}, {"grammar": "start: start start"}),
    [{"type": "function", "function": {"name": "x", "parameters": {"$ref": "#/a"}}}],
    {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
    {"__proto__": 1, "constructor": 2},
]
VALUES = [*NUMBERS, *TEXTS, *OTHERS]
FIELDS = {
    "chat": [*ChatRequest.model_fields, "foo", "__class__", "chat_template", "prompt"],
    "completion": [*CompletionRequest.model_fields, "foo", "", "messages", "\ud800"],
}
HUGE = 2 * 2**20 - 2000


def hostile(service: Service, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield invalid values for every field, alone and combined, at every depth."""
    for kind, make in (("chat", chat), ("completion", completion)):
        for field in FIELDS[kind]:
            for value in VALUES:
                yield make(**{"max_tokens": 2, field: value})
    options = sorted(
        {n for m in service.models.values() for c in m.methods.values() for n in c.options}
    )
    while True:
        make, fields = rng.choice([(chat, FIELDS["chat"]), (completion, FIELDS["completion"])])
        body = make(model=rng.choice([*service.models]), max_tokens=rng.choice([1, 2, 3]))
        match rng.randrange(6):
            case 0:
                body |= {rng.choice(fields): rng.choice(VALUES) for _ in range(rng.randrange(2, 5))}
            case 1:
                model, method = rng.choice(PAIRS)
                names = rng.sample(options, rng.randrange(1, 3))
                given = {name: rng.choice(VALUES) for name in names}
                body |= {"model": model, "outpace": {"method": method, "options": given}}
            case 2:
                extra = {rng.choice([*Extension.model_fields]): rng.choice(VALUES)}
                body |= {"outpace": extra, "stream": rng.random() < 0.5}
            case 3:
                key = rng.choice(["role", "content", "name", "tool_calls", "foo"])
                message = {"role": "user", "content": "x", key: rng.choice(VALUES)}
                body = chat(max_tokens=1) | {"messages": [message] * rng.choice([1, 1, 2])}
            case 4:
                key = rng.choice(["type", "text", "x"])
                part = {"type": "text", "text": "x", key: rng.choice(VALUES)}
                body = chat([part], max_tokens=1)
            case 5:
                keys = ["logit_bias", "chat_template_kwargs", "metadata", "stream_options"]
                body[rng.choice(keys)] = {str(rng.choice(TEXTS + NUMBERS)): rng.choice(VALUES)}
        yield body


def attack(client: TestClient, body: dict[str, Any]) -> int:
    """Send a request; return its status, which an error explains."""
    response = client.post(route(body), content=json.dumps(body))
    if response.status_code == 200:
        whole = response.text.endswith("data: [DONE]\n\n") or response.json()
        assert whole and '"error":' not in response.text.partition('"choices"')[0]
        return 200
    assert 400 <= response.status_code < 500, (body, response.text)
    error = response.json()["error"]
    assert error["message"] and error["type"] and "Traceback" not in response.text
    if "valid JSON" not in error["message"]:
        assert error["param"] is not None, (body, error)
    return response.status_code


def attacks(client: TestClient, service: Service, count: int, seed: int, skip: int = 0) -> set[int]:
    """Send many requests; then a normal one succeeds, and no page is leaked."""
    source = hostile(service, random.Random(seed))
    seen = {attack(client, body) for body in islice(source, skip, skip + count)}
    answer = ask(client, chat(seed=1))
    assert ANSWER in answer["choices"][0]["message"]["content"]
    for model in service.models.values():
        assert not any(usage.held_pages for usage in model.engine.cache_usage)
    return seen


ALONE = len(VALUES) * sum(map(len, FIELDS.values()))
"""Number of requests with one invalid value."""


def test_some_hostile_requests(client: TestClient, service: Service) -> None:
    assert attacks(client, service, 300, seed=0, skip=ALONE) == {200, 400}


@pytest.mark.nightly
def test_many_hostile_requests(client: TestClient, service: Service) -> None:
    assert ALONE > 3000
    assert attacks(client, service, ALONE + 2500, seed=1) <= {200, 400, 404}


@pytest.mark.parametrize(
    "text", ["x" * HUGE, "<|mask|>" * (HUGE // 8), "\n" * (HUGE // 2), "é" * (HUGE // 6)]
)
@pytest.mark.parametrize("make", [chat, completion])
def test_prompt_of_two_megabytes(client: TestClient, make: Any, text: str) -> None:
    body = make(text)
    response = client.post(route(body), json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert attack(client, body) == 400


RAW = (
    b"GET /v1/models HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n{",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
)


def tool(number: int, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


def siege(rng: random.Random) -> Iterator[dict[str, Any] | bytes]:
    """Yield bodies, or bytes of a connection, that ended, filled or hung a server."""
    for number in range(10**9):
        chain = "".join(f'r{i}: r{i + 1} r{i + 1} | "a"\n' for i in range(3000)) + 'r3000: "b"'
        pattern = {"type": "string", "pattern": f"[ab]*a[ab]{{{8 + number % 5}}}"}
        dear = [tool(i, {"properties": {f"p{j}": pattern for j in range(6)}}) for i in range(60)]
        yield chat(structured_outputs={"grammar": f"start: r0\n{chain}"})
        yield chat(
            structured_outputs={"grammar": f'start: "a{number}" | "b{number}"'}, max_tokens=2
        )
        yield chat(
            structured_outputs={"regex": f"x{number}[ab]{{1,{number % 40 + 1}}}"}, max_tokens=2
        )
        yield chat(structured_outputs={"json": {"const": f"{number}"}}, max_tokens=2)
        yield chat(structured_outputs={"regex": "(" * 5000 + ")" * 5000})
        yield chat(tools=dear, max_tokens=2)
        yield chat(tools=[tool(number, {"properties": {f"p{number}": {}}})], max_tokens=2)
        yield chat("x " * 200_000)
        yield chat([{"type": "text", "text": DEEP}])
        yield chat(chat_template_kwargs={"x": DEEP, "y": "x" * 10**6})
        yield chat(
            **{rng.choice(["stop", "tools", "messages", "n", "logit_bias"]): rng.choice(VALUES)}
        )
        yield RAW[number % len(RAW)]


def besiege(process: Process, over: Event) -> None:
    """Send hostile requests until `over`, and fail unless each is answered."""
    for attack in siege(random.Random(0)):
        if over.is_set():
            return
        send(process, attack)


def send(process: Process, attack: dict[str, Any] | bytes) -> None:
    if isinstance(attack, bytes):
        process.raw(attack, half=True)
        return
    with suppress(ValueError):  # NaN in JSON
        response = httpx2.post(f"{process.url}/v1/chat/completions", json=attack, timeout=120)
        assert response.status_code in (200, 400, 404, 413, 422), response.text


def healthy_seconds(process: Process, count: int) -> float:
    body = chat(
        model="tiny-aux", max_tokens=40, ignore_eos=True, outpace={"method": "autoregressive"}
    )
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        response = httpx2.post(f"{process.url}/v1/chat/completions", json=body, timeout=120)
        seconds.append(time.perf_counter() - began)
        assert response.status_code == 200
    return median(seconds)


def resident_mib(process: Process) -> float:
    """Memory of the server and its engine process."""
    number = process.process.pid
    children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
    lines = (Path(f"/proc/{n}/status").read_text().splitlines() for n in [number, *children])
    sizes = [next(line for line in each if line.startswith("VmRSS")) for each in lines]
    return sum(int(size.split()[1]) for size in sizes) / 1024


@pytest.mark.nightly
def test_a_siege_delays_nobody_and_fills_nothing() -> None:
    with serving("tiny-aux", "--cache-gib", "0.1") as process:
        for attack in islice(siege(random.Random(1)), 120):
            send(process, attack)  # first uses allocate
        alone, before = healthy_seconds(process, 20), resident_mib(process)
        over = Event()
        attacker = Thread(target=besiege, args=(process, over))
        attacker.start()
        beside = healthy_seconds(process, 40)
        over.set()
        attacker.join()
        for attack in islice(siege(random.Random(2)), 1000):
            send(process, attack)
        after = resident_mib(process)
    figures = {"alone": alone, "beside": beside, "before": before, "after": after}
    print(figures)
    assert beside < 2 * alone and after < 1.1 * before, figures
