"""A server for tests of the APIs that are translated to chats, and attacks on it."""

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from random import Random
from typing import Any

from starlette.testclient import TestClient

from asking import places
from outpace.server.app import build_server_app
from outpace.server.service import Service
from outpace.server.settings import Config, Entry
from thinking import thinking_model
from toolbox import tool_model

URL = "http://localhost"
MODELS = {
    "open": thinking_model("tiny-ar", "open"),
    "think": thinking_model("tiny-ar", "think"),
    "blocks": thinking_model("tiny-block", "open"),
    "tools": tool_model("tiny-ar", "tool_call"),
    "array": tool_model("tiny-wedlm", "array"),
    "plain": "tiny-ar",
}


def serve_models() -> Iterator[TestClient]:
    """Yield a client of a server of models that think, call tools, or do neither."""
    entries = {name: Entry(path=path) for name, path in MODELS.items()}
    app = build_server_app(Service.load(Config(models=entries)))
    with TestClient(app, URL, raise_server_exceptions=False) as client:
        yield client


def post(served: TestClient, path: str, request: dict[str, Any]) -> str:
    """Return the answer to a request that is right, as text."""
    answer = served.post(path, json=request)
    assert answer.status_code == 200, answer.text
    return answer.text


def named_events(served: TestClient, path: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, each with its name."""
    *lines, nothing = post(served, path, request | {"stream": True}).split("\n\n")
    assert nothing == ""
    pairs = [line.removeprefix("event: ").split("\ndata: ") for line in lines]
    assert all(json.loads(data)["type"] == name for name, data in pairs)
    return [json.loads(data) for _, data in pairs]


ODD: list[Any] = [
    *("{}", "{", "[]", "auto", "text", "user", "", "x", "\ud800", "<think>", "a" * 9999),
    *(None, True, 5, -1, 2.5, 1e999, float("nan"), [], {}, {"type": "object"}, {"x": 1e999}),
    {"type": "text", "text": "x"},
    {"type": "json_schema", "schema": {"const": 1e999}},
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
    if response.status_code != 200:
        assert response.status_code == 400, (body, response.text)
        assert response.json()["error"]["message"], body
    return response.status_code
