"""Infilling over HTTP: same results as the library, and errors that name the field."""

import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import (
    PAIRS,
    ask,
    chat,
    completion,
    events,
    refused,
    serve_models,
    text_of,
    token_counts,
)
from outpace import LLM, Hole
from outpace.server.service import Service
from outpace.server.settings import Entry

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
    return completion(prompt, model=model, outpace=FILL | fields.pop("outpace", {}), **fields)


def conversation(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny-dream", "messages": [*messages], "outpace": FILL}


USERS = chat()["messages"]
ANSWERED = {"role": "assistant", "content": TEXT}


@pytest.mark.sampled
@pytest.mark.parametrize(("model", "method"), PAIRS)
def test_infilling_methods_fill_holes(client: TestClient, model: str, method: str) -> None:
    common = {"model": model, "seed": 5, "temperature": 0.7, "n": 2, "outpace": {"method": method}}
    body = filling(**common)
    turns = conversation(*USERS, ANSWERED) | common | {"outpace": {"method": method, **FILL}}
    if method not in ABLE:
        for each in (body, turns):
            error = refused(client, each)
            assert error["param"] == "outpace.fill"
        return
    for each in (body, turns):
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
        assert token_counts(streamed[-1]) == token_counts(answer)
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
    asked = llm.fill(PARTS, prompt=USERS, **options)
    answer = ask(client, conversation(*USERS, ANSWERED) | options)
    assert answer["choices"][0]["message"]["content"] == asked.text != alone.text
    assert answer["usage"]["prompt_tokens"] == asked.prompt_tokens + asked.given


MANY = "".join(f"{{{{1:{letter}}}}}" for letter in "abcdefghi")
VERIFIED = {"method": "wedlm", "options": {"verify": True}}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("prompt", filling("Tom has.")),
    ("prompt", filling("Tom has {{x}}")),
    ("prompt", filling("{{8}} is his")),
    ("prompt", filling("a{{0}}")),
    ("prompt", filling("a{{2:[}}")),
    ("prompt", filling("a{{2}}{{9:(a|b)*a(a|b){30}}}")),
    ("prompt", filling("a{{2:x{17}}}")),
    ("prompt", filling("a{{999999999}}")),
    ("prompt", filling("a{{600}}")),
    ("prompt", filling("a" + "{{1}}" * 257)),
    ("prompt", filling("a" + MANY)),
    ("prompt", filling([5, 6, 7])),
    ("prompt", filling(["a{{2}}", "b"])),
    ("prompt", filling("{{1:" * 1500)),
    ("messages", chat(TEXT, model="tiny-dream", outpace=FILL)),
    ("messages", conversation(ANSWERED)),
    ("messages", conversation(*USERS, ANSWERED | {"content": "Tom"})),
    ("max_tokens", filling(max_tokens=5)),
    ("stop", filling(stop=["x"])),
    ("stop_token_ids", filling(stop_token_ids=[3])),
    ("min_tokens", filling(min_tokens=3)),
    ("ignore_eos", filling(ignore_eos=True)),
    ("structured_outputs.regex", filling(structured_outputs={"regex": "a"})),
    ("outpace.fill", filling(model="tiny-ar")),
    ("outpace.fill", filling(outpace={"fill": 1})),
    ("outpace.fill", filling(model="tiny-wedlm", outpace=VERIFIED)),
]


@pytest.mark.sampled
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("field", "body"), BAD, ids=lambda value: str(value)[:60])
def test_invalid_templates_are_rejected(
    client: TestClient, field: str, body: dict[str, Any], stream: bool
) -> None:
    assert refused(client, body | {"stream": stream})["param"] == field


def test_operator_limits_hole_tokens() -> None:
    with serve_models(**{"tiny-dream": Entry(path="tiny-dream", max_tokens=6)}) as client:
        assert len(ask(client, filling("a{{..4}}{{2}}"))["outpace"]["holes"]) == 2
        assert refused(client, filling("a{{..4}}{{3}}"))["param"] == "prompt"
