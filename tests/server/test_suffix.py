"""Completions before a suffix, whole and streamed."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import (
    PAIRS,
    ask,
    completion,
    events,
    official_client,
    refused,
    serve_models,
    text_of,
    token_counts,
)
from middles import middle_llm, middle_model
from server.test_infill_template import ABLE

PREFIX, SUFFIX = "Tom has 3+4=<<3+4=", ">>7 apples."


@pytest.fixture(scope="module")
def middle_client() -> Iterator[TestClient]:
    """A client of a server whose model has tokens to fill in the middle."""
    with serve_models(coder=middle_model()) as client:
        yield client


def test_own_tokens_equal_the_library(middle_client: TestClient) -> None:
    create = official_client(middle_client).completions.create
    options: Any = {"max_tokens": 12, "temperature": 0.7, "seed": 4}
    body = {"model": "coder", "prompt": PREFIX, "suffix": SUFFIX}
    answer = create(**body, **options)
    (expected,) = middle_llm().generate(PREFIX, suffix=SUFFIX, **options)
    assert answer.choices[0].text == expected.text and expected.text
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    chunks = create(**body, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    listed = middle_client.post("/tokenize", json=body).json()
    assert listed["tokens"] == middle_llm().text.encode(PREFIX, suffix=SUFFIX)
    two = ask(middle_client, {**body, "prompt": [PREFIX, ""], "n": 2, **options})
    assert two["choices"][0]["text"] == expected.text and len(two["choices"]) == 4


@pytest.mark.sampled
@pytest.mark.parametrize(("model", "method"), PAIRS)
def test_infilling_methods_fill_before_a_suffix(
    client: TestClient, model: str, method: str
) -> None:
    common = {"model": model, "seed": 5, "temperature": 0.7, "logprobs": 0}
    body = completion(PREFIX, suffix=SUFFIX, max_tokens=5, outpace={"method": method}, **common)
    if method not in ABLE:
        assert refused(client, body)["param"] == "suffix"
        return
    answer = ask(client, body)
    (choice,) = answer["choices"]
    filled = completion(
        PREFIX + "{{..5}}" + SUFFIX, outpace={"method": method, "fill": True}, **common
    )
    other = ask(client, filled)
    assert [choice["text"]] == other["outpace"]["holes"] and "holes" not in answer["outpace"]
    assert token_counts(answer) == token_counts(other)
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"]
    streamed = events(client, body | {"stream_options": {"include_usage": True}})
    assert text_of(streamed) == choice["text"]
    assert token_counts(streamed[-1]) == token_counts(answer)
    assert streamed[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    scores = [each["choices"][0]["logprobs"] for each in streamed[:-1]]
    tokens = [token for each in scores if each for token in each["tokens"]]
    assert tokens == choice["logprobs"]["tokens"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {"prompt": [5, 6]}),
        ("prompt", {"prompt": [[5, 6]]}),
        ("prompt", {"prompt": ""}),
        ("suffix", {"suffix": 5}),
        ("suffix", {"outpace": {"fill": True}}),
        ("max_tokens", {"max_tokens": 2**20}),
        ("min_tokens", {"min_tokens": 2}),
        ("ignore_eos", {"ignore_eos": True}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "a"}}),
        ("stop_token_ids", {"stop_token_ids": [5]}),
    ],
)
def test_invalid_field_is_named(client: TestClient, param: str, fields: dict[str, Any]) -> None:
    body = {"model": "tiny-dream", "prompt": PREFIX, "suffix": SUFFIX, **fields}
    for stream in (False, True):
        assert refused(client, body | {"stream": stream})["param"] == param
