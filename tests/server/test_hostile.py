"""Thousands of malicious requests: each gets a named error or an answer."""

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import ANSWER, PAIRS, ask, chat, completion, route
from outpace.server.schema import ChatRequest, CompletionRequest, Extension
from outpace.server.service import Service

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
