"""Answers of every method, whole and streamed: OpenAI's contract and outpace's extensions."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import PAIRS, QUESTION, ask, chat, completion, events, text_of
from outpace import LLM
from outpace.server.service import Service

SHORT: dict[str, Any] = {"max_tokens": 24, "seed": 5}

FIXED: dict[str, dict[str, Any]] = {"dflash": {"tokens": 4}, "speculative": {"tokens": 3}}
"""Options that make the number of forwards independent of timing."""

every = pytest.mark.parametrize(("model", "method"), PAIRS)


def chosen(method: str) -> dict[str, Any]:
    return {"method": method, "options": FIXED.get(method, {})}


@every
def test_stream_equals_whole_answer(client: TestClient, model: str, method: str) -> None:
    body = chat(model=model, outpace=chosen(method), **SHORT)
    whole = ask(client, body)
    chunks = events(client, body | {"stream_options": {"include_usage": True}})
    (choice,) = whole["choices"]
    assert text_of(chunks) == choice["message"]["content"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-2]["choices"][0]["finish_reason"] == choice["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    for key in ("forwards", "tokens", "method", "seed"):
        assert chunks[-1]["outpace"][key] == whole["outpace"][key]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_answer_equals_library(client: TestClient) -> None:
    (output,) = LLM("tiny-ar", "autoregressive").generate(QUESTION, temperature=0.8, seed=3)
    plain = {"method": "autoregressive"}
    answer = ask(client, chat(temperature=0.8, seed=3, outpace=plain))
    assert answer["choices"][0]["message"]["content"] == output.text
    assert answer["choices"][0]["finish_reason"] == output.finish_reason == "stop"
    assert answer["usage"] == {
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": len(output.ids),
        "total_tokens": output.prompt_tokens + len(output.ids),
    }
    assert answer["outpace"]["forwards"] == output.forwards


def test_completion_accepts_texts_and_tokens(client: TestClient, service: Service) -> None:
    ids = service.models["tiny-ar"].text.encode(QUESTION + "\n", raw=True)
    alone = ask(client, completion(**SHORT))
    both = ask(client, completion([QUESTION + "\n"] * 2, **SHORT))
    tokens = ask(client, completion([ids, ids], **SHORT))
    texts = [choice["text"] for choice in alone["choices"] * 2]
    assert [choice["text"] for choice in both["choices"]] == texts
    assert [choice["text"] for choice in tokens["choices"]] == texts
    assert [choice["index"] for choice in both["choices"]] == [0, 1]
    assert both["usage"]["prompt_tokens"] == 2 * alone["usage"]["prompt_tokens"]
    assert [figure["index"] for figure in both["outpace"]] == [0, 1]


def test_choices_have_consecutive_seeds(client: TestClient) -> None:
    body = chat(temperature=1.5, max_tokens=24)
    many = ask(client, body | {"seed": 7, "n": 3})
    texts = [choice["message"]["content"] for choice in many["choices"]]
    for index, text in enumerate(texts):
        alone = ask(client, body | {"seed": 7 + index})
        assert alone["choices"][0]["message"]["content"] == text
        assert alone["usage"]["prompt_tokens"] == many["usage"]["prompt_tokens"]
    assert len(set(texts)) > 1
    chunks = events(client, body | {"seed": 7, "n": 3})
    assert [text_of(chunks, index) for index in range(3)] == texts


def test_random_seed_is_reported(client: TestClient) -> None:
    body = chat(temperature=1.5, max_tokens=24)
    first, second = ask(client, body), ask(client, body)
    assert first["outpace"]["seed"] != second["outpace"]["seed"]
    again = ask(client, body | {"seed": first["outpace"]["seed"]})
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    chunks = events(client, body)
    seed = chunks[-1]["outpace"]["seed"]
    again = ask(client, body | {"seed": seed})
    assert again["choices"][0]["message"]["content"] == text_of(chunks)


@pytest.mark.parametrize("stop", ["=", ["####", "="]])
def test_stop_ends_the_text(client: TestClient, stop: Any) -> None:
    (choice,) = ask(client, chat(stop=stop))["choices"]
    assert choice["message"]["content"] == "First 60-39"
    assert choice["finish_reason"] == "stop"
    assert text_of(events(client, chat(stop=stop))) == "First 60-39"


def test_content_may_come_in_parts(client: TestClient) -> None:
    parts = [{"type": "text", "text": part} for part in (QUESTION[:9], QUESTION[9:])]
    whole, parted = ask(client, chat(**SHORT)), ask(client, chat(parts, **SHORT))
    assert whole["choices"] == parted["choices"]
    told = [{"role": "developer", "content": "Be brief."}, *chat()["messages"]]
    assert ask(client, chat(**SHORT) | {"messages": told})["choices"]


@pytest.mark.parametrize("model", ["tiny-ar", "tiny-dream", "tiny-wedlm"])
def test_top_logprobs(client: TestClient, model: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    (output,) = LLM(model).generate(QUESTION, **fields, logprobs=True, top_logprobs=3)
    assert output.top_logprobs is not None
    expected = [[score for _, score in top] for top in output.top_logprobs]
    body = chat(model=model, **fields, logprobs=True, top_logprobs=3)
    content = ask(client, body)["choices"][0]["logprobs"]["content"]
    for each, scores in zip(content, expected, strict=True):
        assert [t["logprob"] for t in each["top_logprobs"]] == pytest.approx(scores, abs=1e-4)
        assert all(set(t) == {"token", "logprob", "bytes"} for t in each["top_logprobs"])
    chunks = [c for event in events(client, body) for c in event["choices"] if c["logprobs"]]
    assert [each for c in chunks for each in c["logprobs"]["content"]] == content
    plain = completion(model=model, **fields, logprobs=3)
    found = ask(client, plain)["choices"][0]["logprobs"]["top_logprobs"]
    assert [dict(t) for t in found] == [
        {t["token"]: t["logprob"] for t in reversed(each["top_logprobs"])} for each in content
    ]
    chunks = [c for event in events(client, plain) for c in event["choices"] if c["logprobs"]]
    assert [each for c in chunks for each in c["logprobs"]["top_logprobs"]] == found


@pytest.mark.parametrize("model", ["tiny-ar", "tiny-llada"])
def test_logprobs_equal_library(client: TestClient, model: str) -> None:
    (output,) = LLM(model).generate(QUESTION, max_tokens=24, temperature=0.0, logprobs=True)
    assert output.logprobs is not None
    body = chat(model=model, max_tokens=24, temperature=0, logprobs=True)
    content = ask(client, body)["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in content] == pytest.approx(output.logprobs, abs=1e-4)
    assert "".join(each["token"] for each in content) == output.text
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == output.text
    chunks = [choice for chunk in events(client, body) for choice in chunk["choices"]]
    streamed = [each for c in chunks if c["logprobs"] for each in c["logprobs"]["content"]]
    assert streamed == content
    body = completion(model=model, max_tokens=24, temperature=0, logprobs=0)
    (plain,) = ask(client, body)["choices"]
    assert plain["logprobs"]["tokens"] == [each["token"] for each in content]
    assert len(plain["logprobs"]["token_logprobs"]) == len(content)
    offsets = plain["logprobs"]["text_offset"]
    for token, begin in zip(plain["logprobs"]["tokens"], offsets, strict=True):
        assert plain["text"].startswith(token, begin)
    chunks = [choice for chunk in events(client, body) for choice in chunk["choices"]]
    scores = [c["logprobs"] for c in chunks if c["logprobs"]]
    assert [begin for each in scores for begin in each["text_offset"]] == offsets


@pytest.mark.sampled
@every
def test_trace_accounts_for_every_forward(client: TestClient, model: str, method: str) -> None:
    body = chat(model=model, max_tokens=16, seed=1, outpace=chosen(method) | {"trace": True})
    whole = ask(client, body)
    chunks = events(client, body)
    told = [c["outpace"] for c in chunks if c["choices"] and "outpace" in c]
    steps = [step for each in told for step in each["steps"]]

    def timeless(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**step, "seconds": 0} for step in steps]

    assert timeless(steps) == timeless(whole["outpace"]["steps"])
    assert sum(step["kept"] for step in steps) == told[-1]["tokens"] == 16
    assert told[-1]["forwards"] == whole["outpace"]["forwards"]
    assert "steps" not in chunks[-1]["outpace"]
    assert chunks[-1]["usage"] == whole["usage"]
