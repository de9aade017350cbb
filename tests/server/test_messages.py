"""Anthropic's Messages API: text, thoughts and calls, whole and streamed, and what is refused."""

import json
from random import Random
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from asking import QUESTION as STORY
from asking import URL, attack, named_events, post
from outpace.api.parts import CallDelta, PartsDelta
from outpace.server.messages import CountTokensRequest
from outpace.server.writer import BlockBuilder
from toolbox import SCHEMAS, TOOLS, WEATHER

PATH = "/v1/messages"
QUESTION = {"role": "user", "content": "Tom has 3 apples and buys 4 more."}
DECLARED = [
    {
        "name": tool["function"]["name"],
        "input_schema": tool["function"].get("parameters", {"type": "object", "properties": {}}),
    }
    for tool in TOOLS
]
ANY = {"type": "any"}
BUDGET = {"type": "enabled", "budget_tokens": 6}


@pytest.fixture(scope="module")
def client(served: TestClient) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=URL, api_key="none", http_client=served, max_retries=0)


def body(model: str = "open", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [QUESTION], "max_tokens": 40, "seed": 2, **fields}


def ask(served: TestClient, request: dict[str, Any]) -> dict[str, Any]:
    return json.loads(post(served, PATH, request))


def events(served: TestClient, request: dict[str, Any]) -> list[dict[str, Any]]:
    return named_events(served, PATH, request)


REQUESTS: list[dict[str, Any]] = [
    body(thinking=BUDGET),
    body("blocks", thinking=BUDGET, temperature=1),
    body("think", thinking={"type": "disabled"}, system="Be kind."),
    body("plain", temperature=0, system=[{"type": "text", "text": "Be kind."}], top_k=5),
    body("plain", temperature=0, stop_sequences=["ap", "3"]),
    body("plain", max_tokens=3),
    body("tools", max_tokens=200, tools=DECLARED, tool_choice=ANY, temperature=1),
    body("array", max_tokens=200, tools=DECLARED, tool_choice={"type": "tool", "name": "stop"}),
    body("open", max_tokens=100, tools=DECLARED, tool_choice=ANY),
    body("tools", max_tokens=9, tools=DECLARED, tool_choice={"type": "none"}),
    body("plain", max_tokens=32_000, temperature=0),
]


@pytest.mark.parametrize("request_body", REQUESTS, ids=range(len(REQUESTS)))
def test_stream_equals_whole(served: TestClient, request_body: dict[str, Any]) -> None:
    whole = ask(served, request_body)
    start, *rest, end, stop = events(served, request_body)
    assert start["message"]["content"] == [] and stop == {"type": "message_stop"}
    read = ("input_tokens", "cache_read_input_tokens")
    used, begun, ended = (each["usage"] for each in (whole, start["message"], end))
    assert begun["input_tokens"] == sum(used[name] for name in read)
    assert begun["input_tokens"] == sum(ended[name] for name in read)
    assert ended["output_tokens"] == used["output_tokens"]
    for name in ("stop_reason", "stop_sequence"):
        assert end["delta"][name] == whole[name]
    blocks: list[dict[str, Any]] = []
    ended = 0
    for event in rest:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks) == ended
            blocks.append({"json": "", **event["content_block"]})
            continue
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            ended += 1
        else:
            kind = event["delta"].pop("type")
            ((field, text),) = event["delta"].items()
            blocks[-1]["json" if kind == "input_json_delta" else field] += text
    assert ended == len(blocks)
    found = []
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
            jsonschema.validate(block["input"], SCHEMAS[block["name"]])
        if block != {"type": "text", "text": ""}:
            found.append(block)
    for block in (*found, *whole["content"]):
        block.pop("id", None)
    assert found == whole["content"]


def test_each_block_ends_before_the_next() -> None:
    calls = (CallDelta(0, "f", "{}"), CallDelta(1, "g", "{}"))
    parts = PartsDelta(text="b", reasoning="a", calls=calls)
    changes = BlockBuilder().add_parts(parts)
    begun_and_ended = [(each.change, each.block.number) for each in changes]
    assert [each for each in begun_and_ended if each[0] != "text"] == [
        *(("begin", 0), ("end", 0), ("begin", 1), ("end", 1)),
        *(("begin", 2), ("end", 2), ("begin", 3)),
    ]


def test_reason_of_the_end(served: TestClient) -> None:
    whole = ask(served, REQUESTS[-1])
    assert 40 < whole["outpace"]["max_tokens"] <= 512 - whole["usage"]["input_tokens"]
    answers = [ask(served, each) for each in (*REQUESTS[4:8], REQUESTS[3])]
    reasons = ["stop_sequence", "max_tokens", "tool_use", "tool_use", "end_turn"]
    assert [answer["stop_reason"] for answer in answers] == reasons
    assert answers[0]["stop_sequence"] in REQUESTS[4]["stop_sequences"]
    assert answers[4]["stop_sequence"] is None
    end = ask(served, REQUESTS[3] | {"stop_sequences": ["zz", "<|endoftext|>"]})
    assert (end["stop_reason"], end["stop_sequence"]) == ("stop_sequence", "<|endoftext|>")


def test_loop_with_official_client(client: Any) -> None:
    fields = {"max_tokens": 200, "tools": DECLARED}
    first = client.messages.create(
        model="tools", messages=[QUESTION], tool_choice=ANY, extra_body={"seed": 4}, **fields
    )
    blocks = [block.model_dump(exclude_none=True) for block in first.content]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "done", "is_error": False}
        for block in first.content
    ]
    messages = [
        QUESTION,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": results},
    ]
    second = client.messages.create(model="tools", messages=messages, system="Be kind.", **fields)
    assert second.content and second.usage.input_tokens > first.usage.input_tokens
    with client.messages.stream(
        model="open", messages=[QUESTION], max_tokens=30, thinking=BUDGET
    ) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[1].text == streamed
    history = [block.model_dump(exclude_none=True) for block in final.content]
    messages = [QUESTION, {"role": "assistant", "content": history}, QUESTION]
    third = client.messages.create(model="think", messages=messages, max_tokens=9)
    assert third.content[0].text


AGENT: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    "tools": [
        *(tool | {"defer_loading": True, "eager_input_streaming": True} for tool in DECLARED),
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
}
"""Fields as coding agents send them."""


def test_beginning_of_an_answer_is_continued(served: TestClient) -> None:
    story = {"role": "user", "content": STORY}
    sent = body("plain", temperature=0, max_tokens=60, messages=[story])
    (block,) = ask(served, sent)["content"]
    cut = block["text"].index("####")
    begun = {"role": "assistant", "content": [{"type": "text", "text": block["text"][:cut]}]}
    (rest,) = ask(served, sent | {"messages": [story, begun]})["content"]
    assert rest["text"] == block["text"][cut:]
    chat = {"model": "plain", "temperature": 0, "max_tokens": 60, "continue_final_message": True}
    chat |= {"messages": [story, begun], "add_generation_prompt": False}
    (choice,) = json.loads(post(served, "/v1/chat/completions", chat))["choices"]
    assert choice["message"]["content"] == rest["text"]
    for wrong in ({"add_generation_prompt": True}, {"continue_final_message": False}):
        answer = served.post("/v1/chat/completions", json=chat | wrong)
        assert answer.json()["error"]["param"] == "add_generation_prompt"


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cc_version=2.1; cch=1;\nBe kind.",
        [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=2;"},
            {"type": "text", "text": "Be kind."},
        ],
    ],
    ids=["line", "block"],
)
def test_billing_line_is_left_out(served: TestClient, system: Any) -> None:
    kind, billed = (body("plain", temperature=0, system=each) for each in ("Be kind.", system))
    texts = [ask(served, each)["content"] for each in (kind, billed)]
    counts = [post(served, f"{PATH}/count_tokens", each) for each in (kind, billed)]
    assert texts[0] == texts[1] and counts[0] == counts[1]


def test_tokens_are_counted(served: TestClient, client: Any) -> None:
    sent = body("tools", max_tokens=9, **AGENT)
    usage = ask(served, sent)["usage"]
    used = usage["input_tokens"] + usage["cache_read_input_tokens"]
    asked = {name: sent[name] for name in ("model", "messages", "system", "tools")}
    assert client.messages.count_tokens(**asked).input_tokens == used
    error = served.post(f"{PATH}/count_tokens", json=asked | {"messages": []}).json()["error"]
    assert error["message"].startswith("messages:")


def test_tools_of_providers_and_formats(served: TestClient) -> None:
    answer = ask(served, body("tools", **AGENT) | {"tool_choice": ANY, "max_tokens": 200})
    assert answer["stop_reason"] == "tool_use"
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    form = {"format": {"type": "json_schema", "schema": schema}}
    (block,) = ask(served, body("plain", output_config=form, thinking=BUDGET))["content"]
    assert json.loads(block["text"]) == {"n": 7}


CALL = {"type": "tool_use", "id": "x", "name": "stop", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "x"}
TEXT = {"type": "text", "text": "a"}
SAID = {"role": "assistant", "content": [TEXT]}
CALLING = {"role": "assistant", "content": [TEXT, CALL]}


def test_other_parts_of_results_are_noted() -> None:
    found = [{"type": "image"}, {"type": "tool_reference", "tool_name": "stop"}]
    results = {"role": "user", "content": [RESULT | {"content": found}, {"type": "document"}]}
    sent = {"model": "m", "messages": [QUESTION, CALLING, results]}
    tool, user = [*CountTokensRequest.model_validate(sent).chat_messages()][2:]
    assert "image" in tool["content"] and tool["content"].endswith("stop")
    assert (user["role"], "document" in user["content"]) == ("user", True)


SECRET = {"type": "redacted_thinking", "data": "x"}
EMPTY = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("history", "same"),
    [
        ([QUESTION, {"role": "assistant", "content": [SECRET, TEXT]}], [QUESTION, SAID]),
        (
            [QUESTION, {"role": "assistant", "content": [SECRET]}, QUESTION],
            [QUESTION, EMPTY, QUESTION],
        ),
        *(
            ([QUESTION, {"role": "assistant", **each}], [QUESTION])
            for each in (
                {"content": []},
                {"content": None},
                {},
                {"content": ""},
                {"content": [SECRET]},
            )
        ),
        ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
    ],
)
def test_empty_and_redacted_turns(served: TestClient, history: Any, same: Any) -> None:
    given, wanted = (body("plain", messages=each, temperature=0) for each in (history, same))
    assert ask(served, given)["content"] == ask(served, wanted)["content"]
    counts = [post(served, f"{PATH}/count_tokens", each) for each in (given, wanted)]
    assert counts[0] == counts[1]


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 10**7}),
    ("max_tokens", {"max_tokens": -2}),
    ("messages", {"messages": []}),
    ("messages.0.content", {"messages": [{"role": "user", "content": None}]}),
    ("messages.0.content.0", {"messages": [{"role": "user", "content": [SECRET]}]}),
    ("messages", {"messages": [{"role": "user", "content": [RESULT]}]}),
    ("messages", {"messages": [QUESTION, {"role": "assistant", "content": [CALL, CALL]}]}),
    ("messages.0.role", {"messages": [{"role": "tool", "content": "a"}]}),
    ("output_config.effort", {"output_config": {"effort": "much"}}),
    (
        "output_config.format.schema",
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "teapot"}}}},
    ),
    ("messages.0.content.0", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("messages.0.content.1", {"messages": [{"role": "user", "content": CALLING["content"]}]}),
    (
        "messages.0.content.0",
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
    ),
    ("messages", {"messages": [QUESTION, CALLING]}),
    ("stop_sequences.0", {"stop_sequences": [""]}),
    (
        "stop_sequences",
        {"model": "tools", "tools": DECLARED, "stop_sequences": ["x"], "tool_choice": ANY},
    ),
    ("tools", {"model": "plain", "tools": DECLARED}),
    (
        "tools.0.input_schema",
        {"model": "tools", "tools": [DECLARED[1] | {"input_schema": {"type": "teapot"}}]},
    ),
    ("tool_choice", {"model": "tools", "tools": DECLARED, "tool_choice": {"type": "tool"}}),
    ("tool_choice", {"model": "tools", "tool_choice": ANY}),
    ("tool_choice", {"model": "tools", "tools": AGENT["tools"][2:], "tool_choice": ANY}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": -1}}),
    ("thinking", {"thinking": {"type": "disabled"}}),
    ("outpace.fill", {"outpace": {"fill": True}}),
    ("x", {"x": 1}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED)
def test_invalid_field_is_named(served: TestClient, param: str, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = served.post(PATH, json=body(**{"stream": stream, **fields}))
        assert answer.status_code == 400, answer.text
        assert set(answer.json()) == {"type", "error"} and answer.json()["type"] == "error"
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(f"{param}:"), error


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.nightly)])
def test_hostile_requests(served: TestClient, count: int) -> None:
    result = {"role": "user", "content": [RESULT | {"content": "7"}, {"type": "text", "text": "b"}]}
    tools = [DECLARED[0] | {"input_schema": WEATHER}]
    bodies = [
        body(thinking=BUDGET, max_tokens=9),
        body("plain", stop_sequences=["a"], system="x", max_tokens=9),
        body("tools", messages=[QUESTION, CALLING, result], tools=tools, max_tokens=60),
    ]
    before, rng = ask(served, bodies[0])["content"], Random(count)
    assert {attack(served, PATH, bodies, rng) for _ in range(count)} == {200, 400}
    assert ask(served, bodies[0])["content"] == before
