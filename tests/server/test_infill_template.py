"""Infilling over HTTP: same results as the library, and errors that name the field."""

import re
import time
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import PAIRS, QUESTION, ask, chat, completion, events, refused, text_of
from outpace import LLM, Hole
from outpace.server.app import build_server_app
from outpace.server.service import Service
from outpace.server.settings import Config, zoo_entries
from server.conftest import URL

TEXT = "Tom has 3+4=<<3+4={{1:[0-9]}}>>{{..3:[0-9]{1,2}}}{{4}} are his."
PARTS = [
    "Tom has 3+4=<<3+4=",
    Hole(1, regex="[0-9]"),
    ">>",
    Hole(up_to=3, regex="[0-9]{1,2}"),
    Hole(4),
    " are his.",
]
ABLE = {"apd", "block_diffusion", "d2f", "diffusion", "fast_dllm", "left_to_right", "wedlm"}
FILL: dict[str, Any] = {"fill": True}


def filling(prompt: Any = TEXT, *, model: str = "tiny-dream", **fields: Any) -> dict[str, Any]:
    """Request body with an infill template."""
    return completion(prompt, model=model, outpace=FILL | fields.pop("outpace", {}), **fields)


@pytest.mark.sampled
@pytest.mark.parametrize(("model", "method"), PAIRS)
def test_infilling_methods_fill_holes(client: TestClient, model: str, method: str) -> None:
    common = {"model": model, "seed": 5, "temperature": 0.7, "n": 2, "outpace": {"method": method}}
    body = filling(**common)
    conversation = chat(TEXT) | common | {"outpace": {"method": method, **FILL}}
    conversation["messages"] = [*chat()["messages"], {"role": "assistant", "content": TEXT}]
    if method not in ABLE:
        for each in (body, conversation):
            error = refused(client, each)
            assert error["param"] == "outpace.fill" and "not supported by" in error["message"]
        return
    for each in (body, conversation):
        answer = ask(client, each)
        streamed = events(client, each | {"stream_options": {"include_usage": True}})
        for index, (choice, figures) in enumerate(
            zip(answer["choices"], answer["outpace"], strict=True)
        ):
            digit, number, rest = figures["holes"]
            text = choice["text"] if each is body else choice["message"]["content"]
            assert text == f"Tom has 3+4=<<3+4={digit}>>{number}{rest} are his."
            assert re.fullmatch("[0-9]", digit) and re.fullmatch("[0-9]{1,2}", number)
            assert choice["finish_reason"] == "stop" and 5 < figures["tokens"] <= 8
            assert "Tom has 3+4=<<3+4=" + text_of(streamed, index) == text
        assert streamed[-1]["outpace"][1]["holes"] == answer["outpace"][1]["holes"]
        assert streamed[-1]["usage"] == answer["usage"]
        assert answer["usage"]["completion_tokens"] == sum(f["tokens"] for f in answer["outpace"])


def test_infilling_equals_library(client: TestClient, service: Service) -> None:
    llm: LLM = service.client.loop.models["tiny-dream"].llm
    options: Any = {"temperature": 0.6, "top_p": 0.9, "seed": 3}
    alone = llm.fill(PARTS, **options)
    answer = ask(client, filling([TEXT, "One{{2}}."], logprobs=0, **options))
    assert answer["choices"][0]["text"] == alone.text
    assert answer["choices"][1]["text"] == llm.fill(["One", Hole(2), "."], **options).text
    assert answer["outpace"][0]["tokens"] == alone.chosen < len(alone.ids)
    assert answer["usage"]["prompt_tokens"] > alone.given
    messages = chat()["messages"]
    asked = llm.fill(PARTS, prompt=messages, **options)
    body = chat(model="tiny-dream", outpace=FILL, **options)
    body["messages"] = [*messages, {"role": "assistant", "content": TEXT}]
    answer = ask(client, body)
    assert answer["choices"][0]["message"]["content"] == asked.text != alone.text
    assert answer["usage"]["prompt_tokens"] == asked.prompt_tokens + asked.given


def conversation(*messages: tuple[str, str]) -> dict[str, Any]:
    """Chat request body with these messages."""
    listed = [{"role": role, "content": content} for role, content in messages]
    return {"model": "tiny-dream", "messages": listed, "outpace": FILL}


MANY = "".join(f"{{{{1:{letter}}}}}" for letter in "abcdefghi")
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("prompt", filling("Tom has."), "prompt: must contain a hole"),
    ("prompt", filling("Tom has {{x}}"), "'{{x}}' is not a hole: write {{8}}"),
    ("prompt", filling("{{8}} is his"), "no text before the first hole"),
    ("prompt", filling("a{{0}}"), "must be a positive integer, got 0"),
    ("prompt", filling("a{{2:[}}"), "holes[0]: it is malformed"),
    ("prompt", filling("a{{2}}{{9:(a|b)*a(a|b){30}}}"), "holes[1]: it is too large: its automaton"),
    ("prompt", filling("a{{2:x{300}}}"), "holes[0]: its shortest text has 300 characters"),
    ("prompt", filling("a{{2:x{17}}}"), "holes[0]: it has 2 tokens, but the shortest text"),
    ("prompt", filling(r"a{{2:temperature=(.)\1}}"), "holes[0]: a back-reference"),
    ("prompt", filling("a{{999999999}}"), "holes[0]: it is too large for 999999999 tokens"),
    ("prompt", filling("a{{600}}"), "tiny-dream has"),
    ("prompt", filling("a" + "{{1}}" * 257), "at most 256 holes are allowed, got 257"),
    ("prompt", filling("a" + MANY), "at most 8 different regular expressions are allowed, got 9"),
    ("prompt", filling([5, 6, 7]), "must be text with outpace.fill, got token ids"),
    ("prompt", filling(["a{{2}}", "b"]), "prompt: must contain a hole"),
    ("prompt", filling("{{1:" * 1500), "is not a hole"),
    ("prompt", filling("a{{1:" + "{" * 3000), "is not a hole"),
    (
        "messages",
        chat(TEXT, model="tiny-dream", outpace=FILL),
        "the last message must be the assistant's",
    ),
    ("messages", conversation(("assistant", TEXT)), "at least one message must precede it"),
    (
        "messages",
        conversation(("user", QUESTION), ("assistant", "Tom")),
        "messages: must contain a hole",
    ),
    ("max_tokens", filling(max_tokens=5), "cannot be combined with cloze"),
    ("stop", filling(stop=["x"]), "cannot be combined with cloze"),
    ("stop_token_ids", filling(stop_token_ids=[3]), "cannot be combined with cloze"),
    ("min_tokens", filling(min_tokens=3), "cannot be combined with cloze"),
    ("ignore_eos", filling(ignore_eos=True), "cannot be combined with cloze"),
    ("guided_regex", filling(guided_regex="a"), "cannot be combined with cloze"),
    ("outpace.fill", filling(model="tiny-ar"), "not supported by"),
    ("outpace.fill", filling(outpace={"fill": 1}), ""),
    (
        "outpace.fill",
        filling(model="tiny-wedlm", outpace={"method": "wedlm", "options": {"verify": True}}),
        "not supported by",
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "body", "expected_message"), BAD, ids=lambda value: str(value)[:60]
)
def test_invalid_templates_are_rejected_quickly(
    client: TestClient, field: str, body: dict[str, Any], expected_message: str, stream: bool
) -> None:
    began = time.process_time()
    error = refused(client, body | {"stream": stream})
    assert time.process_time() - began < 6
    assert error["param"] == field and expected_message in error["message"], error


def test_operator_limits_hole_tokens() -> None:
    entry = zoo_entries()["tiny-dream"].model_copy(update={"max_tokens": 6})
    service = Service.load(Config(models={"tiny-dream": entry}))
    with TestClient(build_server_app(service), URL) as client:
        assert len(ask(client, filling("a{{..4}}{{2}}"))["outpace"]["holes"]) == 2
        error = refused(client, filling("a{{..4}}{{3}}"))
        assert (
            error["param"] == "prompt"
            and "tokens in all holes are allowed, got 7" in error["message"]
        )
