"""OpenAI's Responses API: text, thoughts and calls, whole and streamed, and what is refused."""

import json
from random import Random
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from asking import attack, named_events, official_client, post
from outpace.server.responses import ResponsesRequest
from toolbox import SCHEMAS, TOOLS, WEATHER

PATH = "/v1/responses"
QUESTION = "Tom has 3 apples and buys 4 more."
DECLARED = [{"type": "function", **tool["function"]} for tool in TOOLS]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SEVEN = {"type": "integer", "enum": [7]}
FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
NAMED = {"type": "function", "name": "get_weather"}


def body(model: str = "open", **fields: Any) -> dict[str, Any]:
    return {"model": model, "input": QUESTION, "max_output_tokens": 60, "seed": 2, **fields}


def ask(served: TestClient, request: dict[str, Any]) -> dict[str, Any]:
    return json.loads(post(served, PATH, request))


def events(served: TestClient, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Events of a stream, numbered in order, each with its name."""
    found = named_events(served, PATH, request)
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def bare(item: dict[str, Any]) -> dict[str, Any]:
    """An item without its ids, which differ between requests."""
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


REQUESTS: list[dict[str, Any]] = [
    body("open", max_reasoning_tokens=6),
    body("open", max_reasoning_tokens=6, text=FORMAT),
    body("blocks", max_reasoning_tokens=6, text=FORMAT, temperature=1),
    body("plain", temperature=0, top_p=0.9, instructions="Be kind."),
    body("plain", max_output_tokens=3, text={"format": {"type": "text"}}),
    body("tools", max_output_tokens=200, tools=DECLARED, tool_choice="required", temperature=1),
    body("array", max_output_tokens=200, tools=DECLARED, tool_choice=NAMED),
    body("open", max_output_tokens=100, tools=DECLARED, tool_choice="required"),
    body("tools", max_output_tokens=9, tools=DECLARED, parallel_tool_calls=False),
]


@pytest.mark.parametrize("request_body", REQUESTS, ids=range(len(REQUESTS)))
def test_stream_equals_whole(served: TestClient, request_body: dict[str, Any]) -> None:
    whole = ask(served, request_body)
    first, *rest, last = events(served, request_body)
    assert first["type"] == "response.created" and first["response"]["output"] == []
    assert last["type"] == f"response.{whole['status']}"
    assert [*map(bare, last["response"]["output"])] == [*map(bare, whole["output"])]
    items: list[dict[str, Any]] = []
    done = []
    for event in rest[1:]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) == len(done)
            items.append({"text": "", **event["item"]})
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[-1]["id"]
            items[-1]["text"] += event["delta"]
        elif kind == "output_item.done":
            text = items[-1]["text"]
            item = event["item"]
            assert text == (item.get("arguments") or item["content"][0]["text"])
            done.append(item)
    assert done == last["response"]["output"]
    assert len(items) == len(whole["output"])
    for item in whole["output"]:
        if item["type"] == "function_call":
            jsonschema.validate(json.loads(item["arguments"]), SCHEMAS[item["name"]])
        if item["type"] == "message" and request_body.get("text") is FORMAT:
            assert json.loads(item["content"][0]["text"]).keys() == {"n"}
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    thinks = whole["output"][0]["type"] == "reasoning"
    assert (usage["output_tokens_details"]["reasoning_tokens"] > 0) == thinks
    assert whole["status"] == ("incomplete" if whole["incomplete_details"] else "completed")


def test_loop_with_official_client(served: TestClient) -> None:
    create: Any = official_client(served).responses.create
    fields = {"model": "tools", "max_output_tokens": 200, "tools": DECLARED, "temperature": 0}
    first = create(input=QUESTION, tool_choice="required", **fields)
    conversation = [{"role": "user", "content": QUESTION}]
    conversation += [item.model_dump(exclude_none=True) for item in first.output]
    for item in first.output:
        result = {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
        conversation.append(result)
    second = create(input=conversation, **fields)
    assert second.output_text and second.store is False
    assert second.usage.input_tokens > first.usage.input_tokens
    more = {"max_reasoning_tokens": 5}
    thought = create(model="open", input=QUESTION, max_output_tokens=30, extra_body=more)
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    history = [item.model_dump(exclude_none=True) for item in thought.output]
    third = create(model="think", input=[*conversation[:1], *history, *conversation[:1]])
    assert third.output_text


def test_stream_with_official_client(served: TestClient) -> None:
    responses = official_client(served).responses
    arguments: Any = {"input": QUESTION, "temperature": 0, "max_output_tokens": 200}
    for more in ({"model": "plain"}, {"model": "tools", "tools": DECLARED}):
        choice: Any = {"tool_choice": "required"} if "tools" in more else {}
        whole: Any = responses.create(**arguments, **more, **choice)
        with responses.stream(**arguments, **more, **choice) as stream:
            names = [event.type for event in stream]
            final: Any = stream.get_final_response()
        assert names[0] == "response.created" and names[-1] == "response.completed"
        assert final.output_text == whole.output_text
        assert [getattr(item, "arguments", None) for item in final.output] == [
            getattr(item, "arguments", None) for item in whole.output
        ]


def test_tools_of_providers_are_left_out(served: TestClient) -> None:
    others = [{"type": "custom", "name": "x", "format": {"type": "grammar"}}, {"type": "mcp"}]
    sent = {"tools": [*DECLARED, *others], "tool_choice": "required", "max_output_tokens": 200}
    answer = ask(served, body("tools", **sent, parallel_tool_calls=False))
    assert [tool["name"] for tool in answer["tools"]] == [tool["name"] for tool in DECLARED]
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    assert ask(served, body(tools=others, tool_choice="auto"))["output"]


CALL = {"type": "function_call", "call_id": "x", "name": "stop", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "x", "output": "done"}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]}


def test_items_become_messages() -> None:
    text = {"role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]}
    user = {"role": "user", "content": [{"type": "input_text", "text": "a"}]}
    result = RESULT | {"output": [{"type": "input_image"}, {"type": "input_text", "text": "dot"}]}
    items = [user, THOUGHT, text, CALL, CALL | {"call_id": "y"}, result, THOUGHT, text, user]
    request = ResponsesRequest.model_validate({"model": "m", "input": items, "instructions": "s"})
    messages = [*request.messages()]
    assert [message["role"] for message in messages] == [
        *("system", "user", "assistant", "tool", "assistant", "user")
    ]
    assert messages[2]["content"] == "Hi" and messages[2]["reasoning_content"] == "Hm"
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["x", "y"]
    assert "input_image" in messages[3]["content"] and messages[3]["content"].endswith("dot")
    assert messages[4] == {"role": "assistant", "reasoning_content": "Hm", "content": "Hi"}
    empty = [{"role": "assistant", **each} for each in ({}, {"content": None}, {"content": []})]
    request = ResponsesRequest.model_validate({"model": "m", "input": empty})
    assert [*request.messages()] == [{"role": "assistant", "content": ""}] * 3


def test_forms_of_other_servers_are_read(served: TestClient) -> None:
    form = {"format": {"type": "json_object", "schema": SEVEN}}
    answer = ask(served, body("plain", text=form, max_output_tokens=-1))
    assert answer["output"][0]["content"][0]["text"] == "7" and answer["max_output_tokens"] > 60
    assert answer["text"] == form


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("conversation", {"conversation": "x"}),
    ("store", {"store": True}),
    ("input", {"input": []}),
    ("max_output_tokens", {"max_output_tokens": -2}),
    ("input.0.content", {"input": [{"role": "user"}]}),
    ("input", {"input": [RESULT]}),
    ("input", {"input": [CALL | {"arguments": "{"}]}),
    ("input.0", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("input.1.output.0.text", {"input": [CALL, RESULT | {"output": [{"type": "text"}]}]}),
    ("input.0.content.0.type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("input.0.role", {"input": [{"role": "tool", "content": "x"}]}),
    ("max_output_tokens", {"max_output_tokens": 10**7}),
    ("reasoning.effort", {"reasoning": {"effort": "much"}}),
    ("max_reasoning_tokens", {"model": "plain", "max_reasoning_tokens": 5}),
    ("tools", {"model": "plain", "tools": DECLARED}),
    ("tools.0.type", {"tools": [{"name": "x"}]}),
    ("tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
    (
        "tools.0.parameters",
        {"model": "tools", "tools": [DECLARED[1] | {"parameters": {"type": "teapot"}}]},
    ),
    ("tool_choice", {"model": "tools", "tools": DECLARED, "tool_choice": NAMED | {"name": "z"}}),
    ("text.format", {"text": {"format": {"type": "json_schema"}}}),
    ("text.format", {"text": {"format": {"type": "text", "schema": {}}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "schema": {"type": "t"}}}}),
    ("outpace.trace", {"outpace": {"trace": True}}),
    ("outpace.method", {"outpace": {"method": "x"}}),
    ("x", {"x": 1}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED)
def test_invalid_field_is_named(served: TestClient, param: str, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = served.post(PATH, json=body(**{"stream": stream, **fields}))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.nightly)])
def test_hostile_requests(served: TestClient, count: int) -> None:
    tools = [DECLARED[0] | {"parameters": WEATHER}]
    conversation = [{"role": "user", "content": "a"}, THOUGHT, CALL, RESULT]
    bodies = [body(model, max_output_tokens=9) for model in ("open", "plain")]
    bodies += [
        body("tools", input=conversation, tools=tools, max_output_tokens=60),
        body("think", text=FORMAT, reasoning={"effort": "low"}, max_reasoning_tokens=3),
    ]
    before, rng = ask(served, bodies[0])["output"], Random(count)
    assert {attack(served, PATH, bodies, rng) for _ in range(count)} == {200, 400}
    assert [*map(bare, ask(served, bodies[0])["output"])] == [*map(bare, before)]
