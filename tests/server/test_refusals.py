"""Invalid requests: each error names the field, and nothing else happens."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import ask, chat, completion, refused
from outpace.api.engine_client import DrainingError, QueueFullError
from outpace.server.service import Service

IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
NAMED = {"name": "x", "schema": {"type": "object"}}
OBJECT = {"type": "json_object"}


PART = {"type": "text", "text": chat()["messages"][0]["content"]}
CACHED = {"role": "user", "content": [PART | {"name": "x", "cache_control": {"ttl": "1h"}}]}


def formatted(named: Any) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": named})


def drafted(**options: Any) -> dict[str, Any]:
    return chat(outpace={"method": "dflash", "options": options})


FIELDS: dict[str, list[Any]] = {
    "n": [0, 9, 1.5, "2", True],
    "max_tokens": [0, -2, 10**9, 1.5, "5", 513, True],
    "max_completion_tokens": [0, -2, 2**62, "x", 513],
    "min_tokens": [-1, 10**9, "x"],
    "temperature": [-1, 2.01, float("nan"), float("inf"), "0", True],
    "top_p": [0, 1.1, float("nan"), "1"],
    "top_k": [-2, 2**40, 1.5, False],
    "min_p": [-0.1, 1.1, float("inf")],
    "seed": [1.5, "1", 2**64, -(2**64), True],
    "stop": ["", 5, ["x"] * 17, "x" * 257, {}],
    "stop_token_ids": [5, [1] * 65, "x"],
    "ignore_eos": [1, "true", []],
    "presence_penalty": [3, -3, "1", float("nan")],
    "frequency_penalty": [2.5, [], True],
    "repetition_penalty": [0, -1, 1000, float("inf")],
    "logit_bias": [[], {str(n): 1 for n in range(1025)}],
    "stream": [1, "yes"],
    "stream_options": [{}, 5, True, {"continuous_usage_stats": 1}],
    "chat_template_kwargs": [[], 5, "x"],
    "user": [5, "x" * 1000],
    "store": ["x"],
    "logprobs": [1, "x"],
    "top_logprobs": [1, 20, -1, 21, True],
    "response_format": [{}, "text", [], 5, {"type": "text", "x": 1}, {"type": "xml"}],
    "structured_outputs": [
        *({}, [], "x", {"json_object": False}, {"x": 1}, {"regex": None}, {"grammar": {}}),
        *({"json": x} for x in ([], "{", "[1]", "x" * 200_000, "[" * 50_000)),
        *({"choice": x} for x in ([], "yes", ["x"] * 4097)),
    ],
    "tools": [[{"type": "function"}], {}],
    "tool_choice": ["required", {"type": "function", "function": {"name": "x"}}, []],
    "parallel_tool_calls": ["x", 1],
    "functions": [[{"name": "x"}], "x"],
    "function_call": ["auto", {"name": "x"}],
    "audio": [{}],
    "modalities": [["audio"], ["text", "audio"], "text"],
    "prediction": [{}],
    "reasoning_effort": ["high", "much", 5, []],
    "verbosity": ["low"],
    "web_search_options": [{}],
    "messages": [[], 5, "x", None, {}],
    "model": [5, "", None, []],
    "outpace": [5, []],
    "an unknown field": [1],
    "chat_template": ["{{ 1 }}"],
    "prompt_embeds": ["x"],
    "best_of": [2],
}
"""Invalid values in chat requests."""

COMPLETION: dict[str, list[Any]] = {
    "best_of": [2, 0],
    "echo": ["x", 1],
    "logprobs": [21, True, -1, 1.5],
    "prompt": [None, [], 5, {}, [""], ["a"] * 65],
    "messages": [[]],
    "chat_template_kwargs": [{}],
    "metadata": [{}],
    "max_completion_tokens": [5],
}
"""Invalid values in completion requests."""

INSIDE: list[tuple[str, dict[str, Any]]] = [
    ("logit_bias.x", chat(logit_bias={"x": 1})),
    ("logit_bias.5", chat(logit_bias={"5": 101})),
    ("stop.1", chat(stop=["a", 5])),
    ("stop_token_ids.0", chat(stop_token_ids=[-1])),
    ("stream_options.x", chat(stream=True, stream_options={"x": 1})),
    ("outpace.x", chat(outpace={"x": 1})),
    ("outpace.method", chat(outpace={"method": "apd"})),
    ("outpace.method", chat(outpace={"method": "/etc/passwd"})),
    ("outpace.options.x", chat(outpace={"options": {"x": 1}})),
    ("outpace.options.shared", chat(outpace={"method": "lookup", "options": {"shared": True}})),
    *(("outpace.options.draft", drafted(draft=each)) for each in ("../x", "tiny-aux", None)),
    *(("outpace.options.tokens", drafted(tokens=each)) for each in (0, 10**9, 1.5)),
    ("outpace.trace", chat(outpace={"trace": 1})),
    ("outpace.provisional", chat(outpace={"provisional": True})),
    ("messages.0.role", {"model": "tiny-ar", "messages": [{"role": "function", "content": "x"}]}),
    ("messages.0.content", {"model": "tiny-ar", "messages": [{"role": "user"}]}),
    ("messages.0.name", {"model": "tiny-ar", "messages": [{**chat()["messages"][0], "name": 5}]}),
    ("messages.0.content", chat(5)),
    ("messages.0.content.0.type", chat([IMAGE])),
    ("messages.0.content.1.type", chat([{"type": "text", "text": "x"}, {"type": "input_audio"}])),
    ("messages", {"model": "tiny-ar", "messages": chat()["messages"] * 1025}),
    ("messages", chat("word " * 600)),
    ("messages", chat("x" * 500_000)),
    ("prompt", completion("word " * 600)),
    ("prompt", completion([5] * 600)),
    ("prompt", completion([10**6])),
    ("prompt.0", completion([1.5])),
    ("prompt.1", completion(["a", 5])),
    ("prompt.1", completion([[5], "a"])),
    ("prompt", completion("")),
    ("max_tokens", chat(max_tokens=1, max_completion_tokens=1)),
    ("structured_outputs.choice.1", chat(structured_outputs={"choice": ["a", None]})),
    ("structured_outputs.json", chat(structured_outputs={"json": 5})),
    ("structured_outputs.whitespace_pattern", chat(structured_outputs={"whitespace_pattern": "x"})),
    ("response_format.type", chat(response_format={"type": "grammar"})),
    ("response_format", chat(response_format={"type": "json_schema"})),
    ("response_format", chat(response_format={"type": "text", "json_schema": NAMED})),
    ("response_format", chat(response_format={"type": "text", "schema": {}})),
    ("response_format", formatted(NAMED) | {"response_format": OBJECT | {"json_schema": NAMED}}),
    ("response_format.schema", chat(response_format=OBJECT | {"schema": {"type": "teapot"}})),
    (
        "structured_outputs.json_object",
        chat(response_format=OBJECT | {"schema": {}}, structured_outputs={"json_object": True}),
    ),
    ("response_format.json_schema.schema", formatted({"name": "x", "schema": "{}"})),
    ("response_format.json_schema.strict", formatted(NAMED | {"strict": 1})),
    ("response_format.json_schema.x", formatted(NAMED | {"x": 1})),
    ("stop_token_ids", chat(stop_token_ids=[10**6])),
    ("logit_bias", chat(logit_bias={"1000000": 1})),
    ("min_tokens", chat(max_tokens=8, min_tokens=9)),
    ("chat_template_kwargs", chat(chat_template_kwargs={"x": 1})),
    ("top_logprobs", chat(logprobs=True, top_logprobs=21)),
]


@pytest.mark.parametrize(
    ("field", "body"),
    [
        *((field, chat(**{field: value})) for field, values in FIELDS.items() for value in values),
        *((f, completion(**{f: value})) for f, values in COMPLETION.items() for value in values),
    ],
)
def test_field_is_named(client: TestClient, field: str, body: dict[str, Any]) -> None:
    error = refused(client, body)
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0] == field
    assert error["message"].startswith(error["param"])


@pytest.mark.parametrize(("param", "body"), INSIDE)
def test_nested_field_is_named(client: TestClient, param: str, body: dict[str, Any]) -> None:
    error = refused(client, body)
    assert error["param"] == param
    assert "/" not in error["message"].replace("/etc/passwd", "").replace("../x", "")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"tools": [], "tool_choice": "auto"},
        {"messages": [chat()["messages"][0] | {"name": "Omar"}]},
        {"functions": [], "function_call": "none"},
        {"modalities": ["text"], "response_format": {"type": "text"}},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"max_tokens": 8.0, "top_k": 0, "prompt_cache_retention": "24h"},
        {"max_tokens": 8.0, "top_k": -1, "messages": [CACHED]},
        {"presence_penalty": 0, "frequency_penalty": 0, "top_logprobs": None, "n": None},
    ],
)
def test_neutral_fields_are_accepted(client: TestClient, fields: dict[str, Any]) -> None:
    usual = {"seed": 1, "max_tokens": 8, "temperature": 2}
    wanted, answer = ask(client, chat(**usual)), ask(client, chat(**usual) | fields)
    assert answer["choices"] == wanted["choices"]


SEVEN = {"type": "array", "items": {"const": 7}, "minItems": 1, "maxItems": 1}
TURNS = [*chat()["messages"], {"role": "assistant", "content": ""}, *chat()["messages"]]


@pytest.mark.parametrize(
    ("body", "same"),
    [
        *((chat(**{name: -1}), chat()) for name in ("max_tokens", "max_completion_tokens")),
        (completion(max_tokens=-1.0), completion()),
        *(
            (chat(response_format=form), formatted({"name": "x", "schema": SEVEN}))
            for form in (
                OBJECT | {"schema": SEVEN},
                {"type": "json_schema", "schema": SEVEN},
                {"type": "json_schema", "json_schema": {"schema": SEVEN}},
            )
        ),
        *(
            (
                chat(messages=[TURNS[0], {"role": "assistant", **empty}, TURNS[2]]),
                chat(messages=TURNS),
            )
            for empty in ({}, {"content": None}, {"content": []})
        ),
        (chat(messages=[{"role": "user", "content": []}]), chat("")),
    ],
)
def test_forms_of_other_servers_are_read(client: TestClient, body: Any, same: Any) -> None:
    seed = {"seed": 1, "temperature": 0}
    assert ask(client, body | seed)["choices"] == ask(client, same | seed)["choices"]


@pytest.mark.parametrize(
    ("body", "param"),
    [(completion(["a"] * 12), "prompt"), (completion(["a"] * 2, n=6), "prompt"), (chat(n=8), "n")],
)
def test_too_many_choices_are_rejected(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch, body: Any, param: str
) -> None:
    engine = service.models["tiny-aux"].engine
    count = (body.get("n") or 1) * (len(body["prompt"]) if "prompt" in body else 1)
    asked = body | {"model": "tiny-aux", "max_tokens": 1}
    monkeypatch.setattr(engine, "max_requests", count - 1)
    error = refused(client, asked)
    assert error["param"] == param
    monkeypatch.setattr(engine, "max_requests", count)
    assert len(ask(client, asked)["choices"]) == count


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[1]", b"null", b"\xff\xfe", b"\x00", b"{'a': 1}"),
        *(b"[" * 100_000, b'{"a":' * 100_000, b'{"model":' + b"1" * 10_000 + b"}"),
        *(b'{"model":"\\ud800","messages":[]}', b'{"\\udfff":1}', b'{"model":"\xed\xa0\x80"}'),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_invalid_json_is_rejected(client: TestClient, path: str, body: bytes) -> None:
    response = client.post(path, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        *(b'{"prompt":[' + each * (2_000_000 // len(each)) + b"1]}" for each in (b"1,", b"[1],")),
        b'{"messages":[' + b"{}," * 600_000 + b"{}]}",
        b"{" + b",".join(b'"%d":1' % n for n in range(150_000)) + b"}",
        b'{"logit_bias":{' + b",".join(b'"a%d":"x"' % n for n in range(16_000)) + b"}}",
        b'{"x":"' + b'\\"' * 1_000_000,
        b'"' * 2_000_000,
        b"\\" * 2_000_000,
        b'{"x":"' + b"[{,:" * 500_000 + b'"}',
    ],
    ids=lambda body: str(body[:24]),
)
def test_complex_bodies_are_rejected(client: TestClient, body: bytes) -> None:
    assert client.post("/v1/completions", content=body).status_code == 400


def test_unknown_model_and_path(client: TestClient) -> None:
    error = refused(client, chat(model="x"), status=404)
    assert (error["type"], error["param"]) == ("not_found_error", "model")
    assert (error["code"], "tiny-ar" in error["message"]) == ("model_not_found", True)
    for method, path, status in [
        *(("GET", "/v1/models/x", 404), ("GET", "/v1/models/../../etc", 404)),
        *(("GET", "/nothing", 404), ("POST", "/v1/models", 405), ("GET", "/v1/completions", 405)),
    ]:
        response = client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["message"]


class Refusing:
    """An engine that rejects every request."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def submit_request(self, *prompt: Any, **options: Any) -> Any:
        raise self.error


def test_full_queue_sets_retry_after(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = service.models["tiny-aux"].engine
    monkeypatch.setattr(
        engine, "submit_request", Refusing(QueueFullError("too many requests")).submit_request
    )
    for stream in (False, True):
        body = chat(model="tiny-aux", stream=stream)
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
    assert ask(client, chat(max_tokens=2))["choices"]


def test_draining_server_is_unavailable(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "is_draining", True)
    assert refused(client, chat(), status=503)["type"] == "unavailable_error"
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 200
    monkeypatch.setattr(service, "is_draining", False)
    engine = service.models["tiny-aux"].engine
    monkeypatch.setattr(
        engine, "submit_request", Refusing(DrainingError("draining")).submit_request
    )
    assert refused(client, chat(model="tiny-aux"), status=503)
