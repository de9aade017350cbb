"""Servers in the process of a test, requests to them, and what the answers must be."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from random import Random
from typing import Any

from starlette.testclient import TestClient

from outpace.server.app import build_server_app
from outpace.server.service import Service
from outpace.server.settings import Config, Entry

URL = "http://localhost"
"""A host that a server without a key accepts."""

QUESTION = (
    "Omar counts 60 people on the boat. Then 39 of them get off and 43 others get on. "
    "How many people are there now?"
)
ANSWER = "#### 64"

ZOO = {
    "tiny-ar": ("autoregressive", "dflash", "eagle", "speculative"),
    "tiny-aux": ("autoregressive",),
    "tiny-dream": ("apd", "d2f", "diffusion", "fast_dllm", "left_to_right"),
    "tiny-llada": ("apd", "d2f", "diffusion", "fast_dllm", "left_to_right"),
    "tiny-d2f": ("d2f", "diffusion", "fast_dllm", "left_to_right"),
    "tiny-block": ("block_diffusion", "d2f"),
    "tiny-wedlm": ("autoregressive", "wedlm"),
}
"""Models of stories that are served where none is named, and the methods of each."""

PAIRS = [(model, method) for model, methods in ZOO.items() for method in methods]


def connect(service: Service) -> TestClient:
    """A client of a server; exceptions become responses."""
    return TestClient(build_server_app(service), URL, raise_server_exceptions=False)


def official_client(client: TestClient) -> Any:
    """OpenAI's client of a server."""
    from openai import OpenAI

    return OpenAI(base_url=f"{URL}/v1", api_key="none", http_client=client, max_retries=0)


@contextmanager
def serve_models(**models: Entry | str) -> Iterator[TestClient]:
    entries = {n: Entry(path=each) if isinstance(each, str) else each for n, each in models.items()}
    service = Service.load(Config(models=entries))
    with connect(service) as client:
        yield client
    service.client.close()


def chat(content: Any = QUESTION, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "tiny-ar", "messages": messages, **fields}


def completion(prompt: Any = QUESTION + "\n", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny-ar", "prompt": prompt, **fields}


def ask(client: TestClient, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(route(body), json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: TestClient, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    response = client.post(route(body), content=json.dumps(body))
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events(client: TestClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = client.post(route(body), json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last, nothing = response.text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    lines = [line for line in lines if line != ": ping"]  # where decoding was slow
    assert all(line.startswith("data: {") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def body_of(path: str, words: str, length: int, **fields: Any) -> dict[str, Any]:
    """A request of any API with a text and a length."""
    text = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    most = "max_output_tokens" if text == "input" else "max_tokens"
    asked = [{"role": "user", "content": words}] if text == "messages" else words
    return {"model": "tiny-ar", text: asked, most: length, **fields}


def token_counts(answer: dict[str, Any]) -> dict[str, int]:
    """Return the numbers of tokens, without those that happened to be in the cache."""
    usage = dict(answer["usage"])
    assert 0 <= usage.pop("prompt_tokens_details")["cached_tokens"] <= usage["prompt_tokens"]
    return usage


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    own = [choice for choice in choices if choice["index"] == index]
    return "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in own)


def route(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def http_scope(path: str) -> dict[str, Any]:
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "root_path": ""}
    return scope | {"query_string": b"", "scheme": "http", "http_version": "1.1"}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    inner = enumerate(value) if isinstance(value, list) else ()
    for key, part in value.items() if isinstance(value, dict) else inner:
        yield from places(part, (*at, key))


def post(served: TestClient, path: str, request: dict[str, Any]) -> str:
    answer = served.post(path, json=request)
    assert answer.status_code == 200, answer.text
    return answer.text


def named_events(served: TestClient, path: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    *lines, nothing = post(served, path, request | {"stream": True}).split("\n\n")
    assert nothing == ""
    pairs = [line.removeprefix("event: ").split("\ndata: ") for line in lines]
    assert all(json.loads(data)["type"] == name for name, data in pairs)
    return [json.loads(data) for name, data in pairs if name not in ("ping", "keepalive")]


DEEP: Any = {}
for _ in range(150):
    DEEP = {"items": DEEP}
ODD: list[Any] = [
    *("{}", "{", "[]", '{"a": NaN}', "none", "auto", "tool", "stop", "text", "user", "", "x"),
    *("\ud800", "<think>", "a" * 9999, None, True, 5, -1, 2.5, 1e999, float("nan"), [], {}, DEEP),
    *({"type": "object"}, {"x": 1e999}, {"$ref": "#"}, {"const": 5}, {"type": "text", "text": "x"}),
    {"type": "json_schema", "schema": {"const": 1e999}},
    {"type": "object", "properties": {"x": {"type": "string", "maxLength": 5000}}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
]
"""Values to put anywhere."""


def attack(client: TestClient, path: str, bodies: Sequence[dict[str, Any]], rng: Random) -> int:
    """Send a request of which some parts were changed; return its status."""
    body = deepcopy(rng.choice(bodies)) | {"stream": rng.random() < 0.3}
    for _ in range(rng.choice([0, 1, 1, 2])):
        *route, last = rng.choice([at for at in places(body) if at and at[0] != "model"])
        part: Any = body
        for key in route:
            part = part[key]
        if isinstance(part, list) and rng.random() < 0.2:
            part.append(deepcopy(part[last]))
        else:
            part[last] = deepcopy(rng.choice(ODD))
    response = client.post(path, content=json.dumps(body))
    assert response.status_code in (200, 400), (body, response.text)
    if response.status_code == 400:
        error = response.json()["error"]
        assert error.get("param", path) or "valid JSON" in error["message"], (body, error)
    elif response.text.startswith("data: "):
        assert response.text.endswith("data: [DONE]\n\n"), body
    return response.status_code
