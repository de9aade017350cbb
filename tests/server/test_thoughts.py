"""Thoughts in chats: whole and streamed, their limit, history, and what is refused."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import ask, events, official_client, refused, serve_models
from thinking import thinking_model

MODELS = {
    "open": ("tiny-ar", "open"),
    "think": ("tiny-ar", "think"),
    "channels": ("tiny-ar", "channels"),
    "diffusion": ("tiny-dream", "open"),
    "blocks": ("tiny-block", "open"),
}
QUESTION = {"role": "user", "content": "Tom has 3 apples and buys 4 more."}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def thinking_client() -> Iterator[TestClient]:
    """A client of a server whose models think, and of one without thoughts."""
    models = {name: thinking_model(*each) for name, each in MODELS.items()}
    with serve_models(**models, plain="tiny-ar") as client:
        yield client


def thinking(model: str = "open", **fields: Any) -> dict[str, Any]:
    usual = {"max_tokens": 40, "max_reasoning_tokens": 6, "seed": 3}
    return {"model": model, "messages": [QUESTION], **usual, **fields}


def joined(chunks: list[dict[str, Any]], index: int) -> dict[str, str]:
    parts = {"reasoning_content": "", "content": ""}
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        assert set(choice["delta"]) <= {"role", *parts}
        for name in parts:
            parts[name] += choice["delta"].get(name) or ""
    return parts


@pytest.mark.parametrize("model", MODELS)
def test_stream_equals_whole(thinking_client: TestClient, model: str) -> None:
    for more in ({}, {"response_format": FORMAT}):
        body = thinking(model, temperature=1, n=1 if model == "diffusion" else 2, **more)
        chunks = events(thinking_client, body)
        for choice in ask(thinking_client, body)["choices"]:
            message = choice["message"]
            parts = joined(chunks, choice["index"])
            assert parts["content"] == message["content"]
            assert parts["reasoning_content"] == message.get("reasoning_content", "")
            assert "think" not in message["content"] and "<|" not in message["content"]
            if more:
                assert json.loads(message["content"]).keys() == {"n"}
                assert choice["finish_reason"] == "stop"
            if MODELS[model][1] == "open" and not more:
                assert message["reasoning_content"]


def test_official_client(thinking_client: TestClient) -> None:
    create: Any = official_client(thinking_client).chat.completions.create
    more = {"max_reasoning_tokens": 5, "chat_template_kwargs": {"enable_thinking": True}}
    body: dict[str, Any] = {"messages": [QUESTION], "max_tokens": 30, "seed": 1}
    first = create(model="open", **body, extra_body={"max_reasoning_tokens": 5})
    message = first.choices[0].message
    assert message.reasoning_content and message.content
    body["messages"] = [QUESTION, message.model_dump(exclude_none=True), QUESTION]
    second = create(model="think", **body, reasoning_effort="none", extra_body=more)
    assert second.choices[0].message.content
    assert not hasattr(second.choices[0].message, "reasoning_content")
    stream = create(model="open", **body, stream=True, extra_body={"max_reasoning_tokens": 5})
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert deltas[0].role == "assistant" and deltas[0].reasoning_content


def test_effort_and_model_description(thinking_client: TestClient) -> None:
    bodies = [thinking("channels", reasoning_effort=effort) for effort in ("low", "xhigh")]
    low, high = (ask(thinking_client, body)["usage"]["prompt_tokens"] for body in bodies)
    assert low != high
    for model, form in (("open", "think"), ("channels", "channels"), ("plain", None)):
        described = thinking_client.get(f"/v1/models/{model}").json()
        assert described["outpace"]["thoughts"] == form


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("max_reasoning_tokens", {"max_reasoning_tokens": -1}),
    ("max_reasoning_tokens", {"max_reasoning_tokens": True}),
    ("max_reasoning_tokens", {"max_reasoning_tokens": 2**21}),
    ("max_reasoning_tokens", {"model": "plain"}),
    ("ignore_eos", {"ignore_eos": True}),
    ("reasoning_effort", {"reasoning_effort": "much"}),
    ("reasoning_effort", {"reasoning_effort": "low"}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "(ab|cd){99}"}}),
    ("messages.0.reasoning_content", {"messages": [QUESTION | {"reasoning_content": "x"}]}),
    (
        "messages.1.reasoning_content",
        {"messages": [QUESTION, {"role": "assistant", "content": "a", "reasoning_content": 5}]},
    ),
    ("chat_template_kwargs", {"chat_template_kwargs": {"x": 1}}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED)
def test_invalid_field_is_named(
    thinking_client: TestClient, param: str, fields: dict[str, Any]
) -> None:
    error = refused(thinking_client, thinking(**fields))
    assert error["param"] == param, error
