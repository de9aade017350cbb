"""Questions to a server, and what its answers must be."""

import json
from collections.abc import Iterator
from typing import Any

from starlette.testclient import TestClient

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


def chat(content: Any = QUESTION, **fields: Any) -> dict[str, Any]:
    """A request for a chat."""
    messages = [{"role": "user", "content": content}]
    return {"model": "tiny-ar", "messages": messages, **fields}


def completion(prompt: Any = QUESTION + "\n", **fields: Any) -> dict[str, Any]:
    """A request for a completion."""
    return {"model": "tiny-ar", "prompt": prompt, **fields}


def ask(client: TestClient, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request that is right."""
    response = client.post(route(body), json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: TestClient, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    """The error of a request that is wrong."""
    response = client.post(route(body), content=json.dumps(body))
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events(client: TestClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Events of a stream that ends well."""
    response = client.post(route(body), json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last, nothing = response.text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    assert all(line.startswith("data: {") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """Text of a choice of a stream."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    own = [choice for choice in choices if choice["index"] == index]
    return "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in own)


def route(body: dict[str, Any]) -> str:
    """Where a request belongs."""
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all parts of a request."""
    yield at
    inner = enumerate(value) if isinstance(value, list) else ()
    for key, part in value.items() if isinstance(value, dict) else inner:
        yield from places(part, (*at, key))
