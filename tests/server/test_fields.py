"""Request fields: what is rejected, listed and documented agrees."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from asking import PAIRS, ask, chat, completion, refused
from outpace.api.loading import LOAD_OPTIONS
from outpace.methods import METHODS
from outpace.server.fields import (
    CAUSAL_FIELDS,
    COMMON_FIELDS,
    INFILL_FIELDS,
    OPTIONS_BY_FIELD,
    OUT_OF_ORDER_FIELDS,
    SEQUENTIAL_FIELDS,
    supported_fields,
)
from outpace.server.schema import ChatRequest, CompletionRequest, Extension
from outpace.server.settings import Config, read_config

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
SETTINGS = PAGE.with_name("operating.md")

RANGE = r"(-?[\d.]+) to (-?[\d.]+)"
KINDS_OF_PENALTY = ("presence", "frequency", "repetition")

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


def test_documented_bounds_are_the_declared_ones() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [\w, ]+ \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    meanings = dict(rows)
    stated = {}
    for field, option in OPTIONS_BY_FIELD.items():
        if option.info.bounds and (found := re.search(RANGE, meanings[field])):
            stated[field] = tuple(map(float, found.groups()))
            assert stated[field] == (option.info.bounds["ge"], option.info.bounds["le"])
    penalties = {f"{kind}_penalty" for kind in KINDS_OF_PENALTY}
    assert set(stated) == {"temperature", "prompt_logprobs"} | penalties


@pytest.mark.parametrize(("model", "method"), PAIRS)
def test_options_are_listed_with_their_help(client: TestClient, model: str, method: str) -> None:
    listed = client.get(f"/v1/models/{model}").json()["outpace"]["methods"][method]
    name = METHODS[method].__name__
    text = "\n".join(page.read_text() for page in sorted(PAGE.parent.glob("methods-*.md")))
    section = text.partition(f"\n## {name}\n")[2] or text.partition(f"# {name}\n")[2]
    table = section.partition("| option | default | meaning |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    assert {each for cell in cells for each in re.findall(r"`(\w+)`", cell)} == {
        option["name"] for option in listed["options"]
    }
    assert all(option["help"] for option in listed["options"])


def test_documentation_lists_the_options_of_a_model() -> None:
    listed_names = re.search(
        r"A model also has\n(.*?), as `LLM` has them", SETTINGS.read_text(), re.DOTALL
    )
    assert listed_names and {*re.findall(r"`(\w+)`", listed_names[1]), "cache_gib"} == {
        *LOAD_OPTIONS
    }


def test_documented_settings_are_read(tmp_path: Path) -> None:
    page = SETTINGS.read_text()
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "serve.toml").write_text(shown)
    config = read_config(tmp_path / "serve.toml")
    assert isinstance(config, Config)
    assert config.server == Config(models=config.models).server
    assert set(config.models) == {"story", "fast", "seldom"}


def test_template_variables_are_those_of_the_template(client: TestClient) -> None:
    for name in ("enable_thinking", "messages", "tools", "add_generation_prompt", "x" * 200):
        error = refused(client, chat(chat_template_kwargs={name: True}))
        assert error["param"] == "chat_template_kwargs"
    assert ask(client, chat(chat_template_kwargs={}, max_tokens=2))
    assert refused(client, completion(chat_template_kwargs={}))
