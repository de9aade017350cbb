"""Tools in chats: calls whole and streamed, results, and what is refused."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from asking import (
    DEEP,
    ask,
    attack,
    events,
    official_client,
    refused,
    serve_models,
    text_of,
    token_counts,
)
from outpace.api.parts import AnswerParser
from outpace.checkpoints.checkpoint import load_tokenizer
from outpace.checkpoints.load import load_config
from outpace.server.settings import Entry
from toolbox import SCHEMAS, TOOLS, tool_model

MODELS = {
    "causal": ("tiny-ar", "tool_call"),
    "array": ("tiny-wedlm", "array"),
    "args": ("tiny-ar", "args"),
    "object": ("tiny-block", "object"),
    "harmony": ("tiny-wedlm", "harmony"),
    "generic": ("tiny-ar", "generic"),
    "diffusion": ("tiny-dream", "tool_call"),
}
CAUSAL = [name for name in MODELS if name != "diffusion"]
"""Models that answer fast; calls of a diffusion model are tested once."""
CALL = {"id": "x", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
QUESTION = {"role": "user", "content": "Tom has 3 apples."}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "x", "content": "done"}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def tool_client() -> Iterator[TestClient]:
    """A client of a server whose models take tools, and of one without."""
    models = {name: tool_model(*each) for name, each in MODELS.items()}
    plain = Entry(path="tiny-ar", tools="template")
    with serve_models(**models, plain=plain) as client:
        yield client


def calling(model: str = "causal", **fields: Any) -> dict[str, Any]:
    usual = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "seed": 3}
    return {"model": model, "messages": [QUESTION], **usual, **fields}


def check_calls(calls: list[dict[str, Any]]) -> None:
    """Assert that calls are valid, and their ids distinct."""
    assert calls and len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert set(call) == {"id", "type", "function"} and call["type"] == "function"
        assert len(call["id"]) == 9 and call["id"].isalnum()
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, SCHEMAS[call["function"]["name"]])


@pytest.mark.parametrize("model", MODELS)
def test_required_calls_are_valid(tool_client: TestClient, model: str) -> None:
    size = {"n": 1, "max_tokens": 60} if model == "diffusion" else {"n": 2}  # it denoises all
    body = calling(model, temperature=1, **size)
    chunks = events(tool_client, body)
    for choice in ask(tool_client, body)["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        calls = choice["message"]["tool_calls"]
        check_calls(calls)
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert own[0]["delta"]["role"] == "assistant" and own[0]["delta"]["content"] is None
        assert own[-1]["finish_reason"] == "tool_calls" and own[-1]["delta"] == {}
        joined: list[dict[str, Any]] = []
        for delta in [d for each in own for d in each["delta"].get("tool_calls", [])]:
            if delta["index"] == len(joined):
                joined.append({key: delta[key] for key in ("id", "type", "function")})
            else:
                assert set(delta) == {"index", "function"}
                assert set(delta["function"]) == {"arguments"}
                joined[-1]["function"]["arguments"] += delta["function"]["arguments"]
        check_calls(joined)
        assert [call["function"] for call in joined] == [call["function"] for call in calls]


@pytest.mark.parametrize("model", CAUSAL)
def test_named_function_is_called_once(tool_client: TestClient, model: str) -> None:
    answer = ask(tool_client, calling(model, tool_choice=NAMED))
    assert answer["outpace"]["tools"] == MODELS[model][1]
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    check_calls([call])
    (choice,) = ask(tool_client, calling(model, parallel_tool_calls=False))["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("model", CAUSAL)
def test_answer_without_a_call(tool_client: TestClient, model: str) -> None:
    size = 12 if model == "harmony" else 3  # the first tokens of gpt-oss's are no content
    body = calling(model, tool_choice="auto", max_tokens=size)
    (choice,) = ask(tool_client, body)["choices"]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert text_of(events(tool_client, body)) == choice["message"]["content"] != ""
    none = ask(tool_client, calling(model, tool_choice="none", max_tokens=3))
    absent = ask(tool_client, calling(model, tools=None, tool_choice=None, max_tokens=3))
    assert none["choices"] == absent["choices"] and token_counts(none) == token_counts(absent)


@pytest.mark.parametrize("model", CAUSAL)
def test_loop_of_calls_and_results(tool_client: TestClient, model: str) -> None:
    completions = official_client(tool_client).chat.completions
    create: Any = completions.create
    first = create(**calling(model, parallel_tool_calls=False))
    message = first.choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    messages = [QUESTION, message.model_dump(exclude_none=True), result]
    body = calling(model, tool_choice="auto", max_tokens=12)
    empty = {"id": "123456789", "function": {"name": "stop", "arguments": ""}}
    messages[1]["tool_calls"] += [CALL | empty]
    second = create(**body | {"messages": messages})
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    with completions.stream(**calling(model)) as stream:
        final: Any = stream.get_final_completion()
    kept = {"id": True, "type": True, "function": {"name", "arguments"}}
    check_calls([c.model_dump(include=kept) for c in final.choices[0].message.tool_calls])


AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
}
AGE_FORMAT = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE}}


@pytest.mark.parametrize("model", CAUSAL)
def test_text_of_a_schema_or_a_call(tool_client: TestClient, model: str) -> None:
    create: Any = official_client(tool_client).chat.completions.create
    body = calling(model, tool_choice="auto", response_format=AGE_FORMAT)
    (choice,) = create(**body).choices
    if choice.message.tool_calls:
        check_calls([c.model_dump() for c in choice.message.tool_calls])
    else:
        jsonschema.validate(json.loads(choice.message.content), AGE)
        chunks = create(stream=True, **body)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == choice.message.content
    (choice,) = create(**body | {"tool_choice": "required"}).choices
    assert choice.message.tool_calls and choice.message.content is None


@pytest.mark.parametrize("model", CAUSAL)
def test_stop_strings_beside_tools(tool_client: TestClient, model: str) -> None:
    body = calling(model, tool_choice="auto", max_tokens=24, temperature=0)
    (whole,) = ask(tool_client, body)["choices"]
    mark = whole["message"]["content"][3]
    (cut,) = ask(tool_client, body | {"stop": mark})["choices"]
    assert cut["message"]["content"] == whole["message"]["content"].partition(mark)[0]
    assert cut["finish_reason"] == "stop"
    assert text_of(events(tool_client, body | {"stop": mark})) == cut["message"]["content"]


@pytest.mark.parametrize("model", ["causal", "array", "args"])
def test_repeated_call_ends_the_answer(tool_client: TestClient, model: str) -> None:
    folder = tool_model(*MODELS[model])
    ends = {*load_config(folder).eos, load_tokenizer(folder).eos_token_id}
    bias = {str(each): -100 for each in ends}
    body = calling(model, tools=TOOLS[1:], logit_bias=bias, max_tokens=300)
    answer = ask(tool_client, body)
    (choice,) = answer["choices"]
    message, finish = choice["message"], choice["finish_reason"]
    assert len(message["tool_calls"]) == 3 and finish == "tool_calls"
    *chunks, last = events(tool_client, body | {"stream_options": {"include_usage": True}})
    deltas = [c["delta"].get("tool_calls", []) for each in chunks for c in each["choices"]]
    assert [call["index"] for each in deltas for call in each if "id" in call] == [0, 1, 2]
    assert token_counts(last) == token_counts(answer)
    results = [RESULT | {"tool_call_id": call["id"]} for call in message["tool_calls"]]
    del message["refusal"]
    assert ask(tool_client, calling(model, messages=[QUESTION, message, *results], max_tokens=60))


def declared(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **function}}]


WIDE = {"type": "object", "properties": {"a": {"enum": ["b"], "nullable": True}}}
ARGUMENTS = "messages.1.tool_calls.0.function.arguments"


def called(**function: Any) -> dict[str, Any]:
    call = CALL | {"function": {"name": "stop", "arguments": "{}"} | function}
    return {"messages": [QUESTION, CALLING | {"tool_calls": [call]}, RESULT]}


BAD_FORMAT = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "teapot"}},
    }
}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tools.0.function.name", {"tools": declared(name="a b")}),
    ("tools.0.function.name", {"tools": declared(name="x" * 65)}),
    ("tools.1.function.name", {"tools": declared() + declared()}),
    ("tools.0.function.x", {"tools": declared(x=1)}),
    ("tools.0.function.parameters", {"tools": declared(parameters=[])}),
    ("tools.0.function.parameters", {"tools": declared(parameters={"type": "teapot"})}),
    ("tools.0.function.parameters", {"tools": declared(parameters={"type": "string"})}),
    ("tools.0.function.parameters", {"tools": declared(parameters=DEEP)}),
    ("tools.0.function.parameters", {"tools": declared(parameters=WIDE, strict=True)}),
    ("tools", {"tools": declared(parameters={"enum": ["x" * 100_000]})}),
    ("tools", {"tools": [each for n in range(129) for each in declared(name=f"f{n}")]}),
    ("tools.0.type", {"tools": [{"type": "web_search"}]}),
    ("tools.0.function", {"tools": [{"type": "function"}]}),
    ("tools", {"max_tokens": 5}),
    ("structured_outputs.grammar", {"structured_outputs": {"grammar": 'start: "a"'}}),
    ("response_format.json_schema.schema", BAD_FORMAT | {"tool_choice": "auto"}),
    ("stop", {"response_format": {"type": "json_object"}, "tool_choice": "auto", "stop": "x"}),
    ("stop", {"stop": "x"}),
    ("tool_choice", {"tools": None}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "unknown"}}}),
    ("tool_choice.function.name", {"tool_choice": {"type": "function", "function": {}}}),
    ("parallel_tool_calls", {"parallel_tool_calls": 1}),
    ("messages.1.tool_call_id", {"messages": [QUESTION, RESULT]}),
    ("messages.2.tool_call_id", {"messages": [QUESTION, CALLING, RESULT | {"tool_call_id": "y"}]}),
    ("messages.3.tool_call_id", {"messages": [QUESTION, CALLING, RESULT, RESULT]}),
    ("messages.2.content", {"messages": [QUESTION, CALLING, RESULT | {"content": None}]}),
    ("messages.0.tool_call_id", {"messages": [QUESTION | {"tool_call_id": "x"}]}),
    ("messages.0.tool_calls", {"messages": [QUESTION | {"tool_calls": [CALL]}]}),
    ("messages.0.content", {"messages": [QUESTION | {"content": None}]}),
    ("messages.1.tool_calls.1.id", {"messages": [QUESTION, CALLING | {"tool_calls": [CALL] * 2}]}),
    (ARGUMENTS, called(arguments="{")),
    (ARGUMENTS, called(arguments="[1]")),
    (ARGUMENTS, called(arguments='{"x": NaN}')),
    (ARGUMENTS, called(arguments=json.dumps({"x": DEEP}))),
    (ARGUMENTS, called(arguments={})),
    ("messages.1.tool_calls.0.function.name", called(name=5)),
    ("messages", called(arguments='{"x": "\\ud800"}')),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED)
def test_invalid_field_is_named(
    tool_client: TestClient, param: str, fields: dict[str, Any]
) -> None:
    error = refused(tool_client, calling(**fields))
    assert error["param"] == param, error


def test_schema_that_is_no_contract_is_a_help(tool_client: TestClient) -> None:
    for strict in (None, False):
        body = calling(tools=declared(parameters=WIDE, strict=strict))
        for call in ask(tool_client, body)["choices"][0]["message"]["tool_calls"]:
            assert json.loads(call["function"]["arguments"]) in ({}, {"a": "b"}, {"a": None})


@pytest.mark.parametrize("choice", ["required", "auto", NAMED])
def test_template_without_tools_is_named(tool_client: TestClient, choice: Any) -> None:
    error = refused(tool_client, calling("plain", tool_choice=choice))
    assert error["param"] == ("tools" if choice == "auto" else "tool_choice")
    assert ask(tool_client, calling("plain", tool_choice="none", max_tokens=2))
    messages = [QUESTION, CALLING, RESULT]
    error = refused(tool_client, calling("plain", tool_choice="none", messages=messages))
    assert error["param"] == "messages.1.tool_calls"


@pytest.mark.parametrize("count", [40, pytest.param(3000, marks=pytest.mark.nightly)])
def test_hostile_tools(tool_client: TestClient, count: int) -> None:
    before = ask(tool_client, calling())["choices"][0]["message"]["tool_calls"]
    rng, more = Random(count), {"messages": [QUESTION, CALLING, RESULT], "max_tokens": 60}
    bodies = [
        calling(model, tool_choice=choice, **more)
        for model in CAUSAL
        for choice in ("required", "auto", "none", NAMED)
    ]
    path = "/v1/chat/completions"
    assert {attack(tool_client, path, bodies, rng) for _ in range(count)} == {200, 400}
    after = ask(tool_client, calling())["choices"][0]["message"]["tool_calls"]
    assert [call["function"] for call in before] == [call["function"] for call in after]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_parsed_once(
    tool_client: TestClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    parsers, feed = list[AnswerParser](), AnswerParser.feed

    def count(parser: AnswerParser, piece: str, **more: Any) -> None:
        parsers.append(parser)
        feed(parser, piece, **more)

    monkeypatch.setattr(AnswerParser, "feed", count)
    (events if stream else ask)(tool_client, calling())
    assert len({*map(id, parsers)}) == 1


def test_a_call_that_is_sent_back_is_reused(tool_client: TestClient) -> None:
    named = {"type": "function", "function": {"name": "stop"}}
    body = calling("generic", tool_choice=named, max_tokens=40)
    first = ask(tool_client, body)
    message = first["choices"][0]["message"]
    (call,) = message["tool_calls"]
    result = RESULT | {"tool_call_id": call["id"]}
    for name in ("stop", "get_weather"):
        call["function"]["name"] = name
        turns = [*body["messages"], message, result]
        usage = ask(tool_client, body | {"messages": turns, "tool_choice": "auto"})["usage"]
        held = first["usage"]["prompt_tokens"]
        held += first["usage"]["completion_tokens"] * (name == "stop")
        assert held - 17 <= usage["prompt_tokens_details"]["cached_tokens"] < held + 16
