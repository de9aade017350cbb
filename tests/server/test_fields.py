"""Request fields: what is rejected, listed and documented agrees."""

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from asking import PAIRS, ask, chat, refused
from outpace.methods import METHODS
from outpace.server.method_choice import (
    CAUSAL_FIELDS,
    COMMON_FIELDS,
    INFILL_FIELDS,
    OUT_OF_ORDER_FIELDS,
    SEQUENTIAL_FIELDS,
    supported_fields,
)
from outpace.server.schema import ChatRequest, CompletionRequest, Extension
from outpace.server.settings import Config, read_config

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
SETTINGS = PAGE.with_name("operating.md")


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
    "guided_json": {"type": "integer"},
    "guided_regex": "[a-z]{2}",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'start: "a" "b"?',
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
    kinds = {
        name: kind(**dict.fromkeys(kind.roles, "x"))  # type: ignore[arg-type]
        for name, kind in METHODS.items()
    }
    for field in (*COMMON_FIELDS, *SPECIAL_FIELDS):
        able = {name for name, method in kinds.items() if field in supported_fields(method)}
        listed_names = shown.pop(field)
        assert (set(METHODS) if listed_names == "all" else set(listed_names.split(", "))) == able
    assert not shown


def test_documented_settings_are_read(tmp_path: Path) -> None:
    page = SETTINGS.read_text()
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "serve.toml").write_text(shown)
    config = read_config(tmp_path / "serve.toml")
    assert isinstance(config, Config)
    assert config.server == Config(models=config.models).server
    assert set(config.models) == {"story", "fast", "seldom"}
