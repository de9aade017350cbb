"""What pages show and the OpenAPI document lists: requests, fields, settings and replies."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai as official
import pytest
from hypothesis import HealthCheck, given, settings
from starlette.testclient import TestClient

from asking import PAIRS, ask, chat, refused
from outpace.methods import METHODS
from outpace.server.app import build_server_app
from outpace.server.document import REQUEST_MODELS
from outpace.server.method_choice import (
    CAUSAL_FIELDS,
    COMMON_FIELDS,
    INFILL_FIELDS,
    OUT_OF_ORDER_FIELDS,
    SEQUENTIAL_FIELDS,
    supported_fields,
)
from outpace.server.schema import ChatRequest, CompletionRequest, Extension
from outpace.server.service import Service
from outpace.server.settings import Config, Settings, build_config, zoo_entries
from shown import ROOT, blocks, is_right

PAGE = ROOT / "docs" / "server.md"
REQUESTS = [
    shlex.split(line)
    for block in blocks(PAGE, "sh")
    for line in block.splitlines()
    if line.startswith("curl ")
]
SPECIAL_FIELDS = (*SEQUENTIAL_FIELDS, *CAUSAL_FIELDS, *OUT_OF_ORDER_FIELDS, *INFILL_FIELDS)

VALUES = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "min_p": 0.1,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop_token_ids": [5],
    "logit_bias": {"5": 2},
    "logprobs": True,
    "prompt_logprobs": 2,
    "top_k": 3,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["yes", "no"]},
    "structured_outputs.grammar": 'start: "a" "b"?',
}
"""Fields with values that have an effect."""


@pytest.mark.sampled
@pytest.mark.parametrize(("model", "method"), PAIRS)
def test_listed_fields_are_accepted(client: TestClient, model: str, method: str) -> None:
    listed = client.get(f"/v1/models/{model}").json()["outpace"]["methods"][method]
    for field, value in VALUES.items():
        outer, _, inner = field.partition(".")
        given = {outer: {inner: value} if inner else value}
        body = chat(model=model, max_tokens=4, seed=1, outpace={"method": method}, **given)
        if field in listed["fields"]:
            ask(client, body)
        else:
            assert refused(client, body)["param"] == field
    body = chat(model=model, max_tokens=4, outpace={"method": method, "provisional": True})
    assert listed["provisional"] == ("outpace.provisional" in listed["fields"])
    if listed["provisional"]:
        ask(client, body)
    else:
        assert refused(client, body)["param"] == "outpace.provisional"


def test_every_field_is_in_the_table() -> None:
    known = {*COMMON_FIELDS, *SPECIAL_FIELDS}
    own = {f"outpace.{name}" for name in Extension.model_fields}
    asked = set(ChatRequest.model_fields) & set(CompletionRequest.model_fields) | own
    assert asked - known == {"model", "user", "outpace", "outpace.method", "outpace.options"}


def test_documentation_has_the_table() -> None:
    page = PAGE.read_text()
    groups = {"all": "all", **dict(re.findall(r"^- \*(\w+)\*: ([\w, ]+)$", page, re.MULTILINE))}
    rows = re.findall(r"^\| `([\w.]+)` \| (\w+) \|", page, re.MULTILINE)
    shown = {field: groups[methods] for field, methods in rows if methods in groups}
    kinds: dict[str, Any] = {
        name: kind(**dict.fromkeys(kind.roles, "x")) for name, kind in METHODS.items()
    }
    for field in (*COMMON_FIELDS, *SPECIAL_FIELDS):
        able = {name for name, method in kinds.items() if field in supported_fields(method)}
        listed = shown.pop(field)
        assert (set(METHODS) if listed == "all" else set(listed.split(", "))) == able
    assert not shown


@pytest.mark.parametrize("words", REQUESTS, ids=lambda words: words[1].rpartition("/v1/")[2])
def test_requests_are_answered(words: list[str], client: TestClient) -> None:
    _, address, *rest = words
    route = address.removeprefix("http://127.0.0.1:8000")
    if not rest:
        assert client.get(route).json()["data"]
        return
    assert rest[0] == "-d"
    reply = client.post(route, json=json.loads(rest[1])).json()
    choice = reply["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert text.strip().startswith("12 16 20 24"), text


@pytest.mark.nightly
def test_official_client_example(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    anthropic = pytest.importorskip("anthropic")
    code = "".join(blocks(PAGE, "py"))

    def here(base_url: str, api_key: str) -> Any:
        assert base_url == "http://127.0.0.1:8000/v1"
        inside = f"{client.base_url}/v1"
        return kind(base_url=inside, api_key=api_key, http_client=client, max_retries=0)

    def there(base_url: str, api_key: str) -> Any:
        assert base_url == "http://127.0.0.1:8000"
        inside = str(client.base_url)
        return other(base_url=inside, api_key=api_key, http_client=client, max_retries=0)

    kind, other = official.OpenAI, anthropic.Anthropic
    monkeypatch.setattr(official, "OpenAI", here)
    monkeypatch.setattr(anthropic, "Anthropic", there)
    exec(compile(code, PAGE.name, "exec", dont_inherit=True), {"__name__": "shown"})
    assert is_right(code, capsys.readouterr().out)


def test_settings_are_read(tmp_path: Path) -> None:
    (shown,) = blocks(PAGE.with_name("operating.md"), "toml")
    (tmp_path / "serve.toml").write_text(shown)
    config = build_config(tmp_path / "serve.toml", {}, {"port": 8001})
    assert config.server.port == 8001 and set(config.models) == {"story", "fast", "seldom"}
    assert config.models["seldom"].lazy and config.models["seldom"].keep == "10m"
    plain = build_config(tmp_path / "serve.toml", {}, {})
    assert plain.server == Config(models=plain.models).server


def test_document_names_every_route_and_field(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for kind in REQUEST_MODELS:
        assert set(schemas[kind.__name__]["properties"]) == set(kind.model_fields)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                if status != "200":
                    assert answer["content"]["application/json"]["schema"]["$ref"].endswith("Error")
            assert "422" not in operation["responses"], path


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_document_matches_server() -> None:
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    checked = (
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    )
    models = {name: replace(entry, max_tokens=4) for name, entry in zoo_entries().items()}
    service = Service.load(Config(models=models, server=Settings(insecure=True)))
    document = schemathesis.openapi.from_asgi("/openapi.json", build_server_app(service))
    for result in document.get_all_operations():
        operation = result.ok()
        modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
        for mode in modes if operation.body else modes[:1]:

            @settings(suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=mode))
            def hold(case: Any) -> None:
                case.call_and_validate(checks=checked)

            hold()
