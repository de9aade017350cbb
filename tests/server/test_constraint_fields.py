"""Constraints over HTTP: conforming answers, errors that name the field, and concurrency."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import QUESTION, ask, chat, events, refused
from outpace import LLM
from outpace.server.app import build_server_app
from outpace.server.service import Service
from server.test_request_handler import Call

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name"],
    "additionalProperties": False,
}
LARK = 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/'
SLOW = "(a|b)*a(a|b){30}"
"""An automaton of 2^31 states: compilation runs to its limit."""


def formatted(schema: Any, **more: Any) -> dict[str, Any]:
    named = {"name": "it", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-ar")


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("schema", formatted(SCHEMA, strict=True)),
        ("regex", {"structured_outputs": {"regex": r"[A-Z][a-z]+ has \d{1,3} (apples|pears)\."}}),
        ("choices", {"structured_outputs": {"choice": ["yes", "no", "seven apples"]}}),
        ("schema", {"structured_outputs": {"json": SCHEMA}}),
        ("schema", {"structured_outputs": {"json": json.dumps(SCHEMA)}}),
        ("grammar", {"structured_outputs": {"grammar": LARK}}),
    ],
)
def test_fields_equal_library_options(
    llm: LLM, client: TestClient, option: str, given: dict[str, Any]
) -> None:
    if "structured_outputs" in given:
        (value,) = given["structured_outputs"].values()
    else:
        value = given["response_format"]["json_schema"]["schema"]
    if option == "schema" and isinstance(value, str):
        value = json.loads(value)
    common = {"max_tokens": 40, "seed": 3, "temperature": 0.8}
    (output,) = llm.generate(QUESTION, **common, **{option: value})
    (choice,) = ask(client, chat(QUESTION, **common, **given))["choices"]
    assert choice["message"]["content"] == output.text
    assert choice["finish_reason"] == output.finish_reason


def test_choices_are_scored(llm: LLM, client: TestClient) -> None:
    choices = ["yes", "no", "seven apples"]
    (output,) = llm.generate(QUESTION, choices=choices, logprobs=True, temperature=0.0)
    given = {"structured_outputs": {"choice": choices}, "logprobs": True, "temperature": 0}
    whole = ask(client, chat(QUESTION, **given))["outpace"]["choices"]
    assert whole == events(client, chat(QUESTION, **given))[-1]["outpace"]["choices"]
    assert {e["text"]: e["logprob"] for e in whole} == pytest.approx(output.choice_logprobs)
    assert refused(client, chat(QUESTION, model="tiny-dream", **given))["param"] == "logprobs"


@pytest.mark.parametrize(
    "given",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
)
@pytest.mark.parametrize("model", ["tiny-ar", "tiny-dream", "tiny-wedlm"])
def test_json_object_gives_an_object(client: TestClient, model: str, given: dict[str, Any]) -> None:
    (choice,) = ask(client, chat(model=model, max_tokens=32, temperature=0.8, **given))["choices"]
    assert isinstance(json.loads(choice["message"]["content"]), dict)


def deep(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "minItems": 1}
    return schema


HOPELESS = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
DREAM = {"model": "tiny-dream", "max_tokens": 16, "outpace": {"method": "d2f"}}
"""A method that fills holes in any order, without fallback to a grammar."""
AT = "response_format.json_schema.schema"
BAD: list[tuple[str, dict[str, Any]]] = [
    ("structured_outputs.regex", {"structured_outputs": {"regex": SLOW}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "x" * 2_000_000}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "\\ud800"}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "x{300}"}, "max_tokens": 20}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": r"\bfoo"}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": ["x" * 600]}, "max_tokens": 2}),
    (AT, formatted({"type": "a prompt of 5 tokens"})),
    (AT, formatted({"properties": {"a": {"enum": [math.nan]}}}) | DREAM),
    (AT, formatted({"type": "string", "minLength": 10**9}) | DREAM),
    (AT, formatted({"$ref": "file:///etc/passwd"})),
    (AT, formatted(HOPELESS)),
    (AT, formatted(deep(80)) | DREAM),
    (AT, formatted({"type": "number", "multipleOf": 0.01}) | DREAM),
    ("response_format.type", {"response_format": {"type": "json_object"}, "max_tokens": 1}),
    ("structured_outputs.json", {"structured_outputs": {"json": '{"enum": ["\\ud800"]}'}}),
    ("structured_outputs.json", {"structured_outputs": {"json": '{"minimum": Infinity}'}}),
    (
        "structured_outputs.json",
        {"structured_outputs": {"json": '{"items":' * 50_000 + "{}" + "}" * 50_000}},
    ),
    ("structured_outputs.grammar", {"structured_outputs": {"grammar": "start: )("}}),
    ("structured_outputs.grammar", {"structured_outputs": {"grammar": "%import os"}}),
    ("structured_outputs.grammar", {"structured_outputs": {"grammar": "x" * 1_000_000}}),
    ("structured_outputs.grammar", {"structured_outputs": {"grammar": LARK}} | DREAM),
    ("structured_outputs.choice", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "a"}, **formatted(SCHEMA)}),
    ("stop", {"structured_outputs": {"regex": "a"}, "stop": ["a"]}),
    ("min_tokens", {"structured_outputs": {"regex": "a"}, "min_tokens": 3}),
    ("ignore_eos", {"structured_outputs": {"regex": "a"}, "ignore_eos": True}),
]


@pytest.mark.sampled
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("field", "given"), BAD, ids=lambda value: str(value)[:60])
def test_invalid_constraints_are_refused(
    client: TestClient, field: str, given: dict[str, Any], stream: bool
) -> None:
    error = refused(client, chat(stream=stream, **given))
    assert error["param"] == field and error["message"].startswith(field)
    assert str(Path.cwd()) not in error["message"] and "Traceback" not in error["message"]


def test_slow_constraint_delays_no_other(service: Service) -> None:
    known = {"structured_outputs": {"regex": "[a-f]{4}"}}

    async def run() -> list[str]:
        app, over = build_server_app(service), []
        await Call(app, chat(max_tokens=8, **known)).task
        slow = [Call(app, chat(structured_outputs={"regex": f"{SLOW}{n}"})) for n in range(3)]
        calls = {
            **{f"slow {n}": call for n, call in enumerate(slow)},
            "free": Call(app, chat(max_tokens=8)),
            "known": Call(app, chat(max_tokens=8, **known)),
        }
        for name, call in calls.items():
            call.task.add_done_callback(lambda _, name=name: over.append(name))
        await asyncio.gather(*(call.task for call in calls.values()))
        assert [call.sent[0]["status"] for call in calls.values()] == [400] * 3 + [200] * 2
        return over

    assert asyncio.run(run())[-1] == "slow 2"


@pytest.mark.nightly
def test_disconnect_during_compilation(service: Service) -> None:
    async def run() -> None:
        app = build_server_app(service)
        gone = Call(app, chat(structured_outputs={"regex": f"x{SLOW}"}))
        await asyncio.sleep(0.05)
        gone.gone.set()
        await gone.task
        again = Call(app, chat(structured_outputs={"regex": "[a-c]{2}"}))
        await again.task
        assert again.sent[0]["status"] == 200

    asyncio.run(run())
    assert not service.pending and not service.client.requests
    assert not service.client.loop.compiling
