"""Answers of every method: OpenAI's contract, extensions, lengths, and token ids of prompts."""

from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import (
    PAIRS,
    QUESTION,
    ask,
    body_of,
    chat,
    completion,
    events,
    refused,
    serve_models,
    text_of,
    token_counts,
)
from outpace import LLM
from outpace.server.service import Service
from outpace.server.settings import Entry

SHORT: dict[str, Any] = {"max_tokens": 16, "seed": 5}

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
    assert token_counts(chunks[-1]) == token_counts(whole)
    for key in ("forwards", "tokens", "method", "seed"):
        assert chunks[-1]["outpace"][key] == whole["outpace"][key]
    assert len({chunk["id"] for chunk in chunks}) == 1
    usage = {"include_usage": True, "continuous_usage_stats": True}
    running = events(client, body | {"stream_options": usage})
    counts = [chunk["usage"] for chunk in running[:-1]]
    assert counts == sorted(counts, key=lambda each: each["completion_tokens"])
    assert counts[0]["prompt_tokens"] == counts[-1]["prompt_tokens"]
    assert counts[-1] == token_counts(running[-1]) == token_counts(whole)


def test_answer_equals_library(client: TestClient) -> None:
    (output,) = LLM("tiny-ar", "autoregressive").generate(QUESTION, temperature=0.8, seed=3)
    plain = {"method": "autoregressive"}
    answer = ask(client, chat(temperature=0.8, seed=3, outpace=plain))
    assert answer["choices"][0]["message"]["content"] == output.text
    assert answer["choices"][0]["finish_reason"] == output.finish_reason == "stop"
    assert token_counts(answer) == {
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": len(output.ids),
        "total_tokens": output.prompt_tokens + len(output.ids),
    }
    assert answer["outpace"]["forwards"] == output.forwards


CACHED = {
    "/v1/chat/completions": "prompt_tokens_details",
    "/v1/completions": "prompt_tokens_details",
    "/v1/messages": None,
    "/v1/responses": "input_tokens_details",
}


@pytest.mark.parametrize("path", CACHED)
def test_cached_tokens_are_shown(client: TestClient, path: str) -> None:
    details = CACHED[path]
    body = body_of(path, f"{path} " + "counts what the cache holds of a prompt " * 4, 2)
    usages = [client.post(path, json=body).json()["usage"] for _ in range(2)]
    cached = [
        usage["cache_read_input_tokens"] if details is None else usage[details]["cached_tokens"]
        for usage in usages
    ]
    prompts = [usage.get("prompt_tokens", usage.get("input_tokens")) for usage in usages]
    assert cached[0] < 16 <= cached[1] <= prompts[0]
    if details is None:
        assert prompts[0] + cached[0] == prompts[1] + cached[1]


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


@pytest.mark.parametrize("model", ["tiny-ar", "tiny-llada", "tiny-wedlm"])
def test_logprobs_equal_library(client: TestClient, model: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 16, "temperature": 0}
    (output,) = LLM(model).generate(QUESTION, **fields, logprobs=True, top_logprobs=3)
    body = chat(model=model, **fields, logprobs=True, top_logprobs=3)
    content = ask(client, body)["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in content] == pytest.approx(output.logprobs, abs=1e-4)
    assert "".join(each["token"] for each in content) == output.text
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == output.text
    for each, top in zip(content, output.top_logprobs or (), strict=True):
        scores = [score for _, score in top]
        assert [t["logprob"] for t in each["top_logprobs"]] == pytest.approx(scores, abs=1e-4)
        assert all(set(t) == {"token", "logprob", "bytes"} for t in each["top_logprobs"])
    assert [each for part in streamed_logprobs(client, body) for each in part["content"]] == content
    text = "🙂 日本 ü!"
    split = ask(client, body | {"structured_outputs": {"regex": text}})["choices"][0]["logprobs"][
        "content"
    ]
    assert bytes(byte for each in split for byte in each["bytes"]).decode() == text
    body = completion(model=model, **fields, logprobs=3)
    (choice,) = ask(client, body)["choices"]
    found = choice["logprobs"]
    assert found["tokens"] == [each["token"] for each in content]
    assert len(found["token_logprobs"]) == len(content)
    assert found["top_logprobs"] == [
        {t["token"]: t["logprob"] for t in reversed(each["top_logprobs"])} for each in content
    ]
    for token, begin in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"].startswith(token, begin)
    parts = streamed_logprobs(client, body)
    for name in ("text_offset", "top_logprobs"):
        assert [each for part in parts for each in part[name]] == found[name]


def streamed_logprobs(client: TestClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    choices = [choice for chunk in events(client, body) for choice in chunk["choices"]]
    return [choice["logprobs"] for choice in choices if choice["logprobs"]]


@pytest.mark.sampled
@every
def test_trace_accounts_for_every_forward(client: TestClient, model: str, method: str) -> None:
    body = chat(model=model, max_tokens=16, seed=1, outpace=chosen(method) | {"trace": True})
    whole = ask(client, body)
    chunks = events(client, body)
    figures = [c["outpace"] for c in chunks if c["choices"] and "outpace" in c]
    steps = [step for each in figures for step in each["steps"]]

    def timeless(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**step, "seconds": 0, "cached": 0} for step in steps]

    assert timeless(steps) == timeless(whole["outpace"]["steps"])
    assert sum(step["committed"] for step in steps) == figures[-1]["tokens"] == 16
    assert figures[-1]["forwards"] == whole["outpace"]["forwards"]
    assert "steps" not in chunks[-1]["outpace"]
    assert token_counts(chunks[-1]) == token_counts(whole)


CONTEXT = 512
"""Context length of every model of the zoo."""


@pytest.mark.parametrize(
    ("model", "prompt", "wanted"),
    [("tiny-ar", 400, CONTEXT - 400), ("tiny-dream", 1, 256), ("tiny-dream", 400, CONTEXT - 400)],
)
def test_default_length_fills_the_context(
    client: TestClient, model: str, prompt: int, wanted: int
) -> None:
    quick = {"method": "diffusion", "options": {"steps": 4}} if model == "tiny-dream" else {}
    asked = completion([5] * prompt, model=model, ignore_eos=True, outpace=quick)
    answer = ask(client, asked)
    assert answer["usage"]["completion_tokens"] == wanted
    assert answer["choices"][0]["finish_reason"] == "length"


def test_default_length_ends_at_eos(client: TestClient) -> None:
    answer = ask(client, chat(seed=1))
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"] == ask(client, chat(seed=1, max_tokens=300))["choices"]


@pytest.fixture(scope="module")
def bounded() -> Iterator[TestClient]:
    names = ("tiny-ar", "tiny-dream")
    limited = {name: Entry(path=name, cache_gib=0.05, max_tokens=40) for name in names}
    with serve_models(**limited) as client:
        yield client


@pytest.mark.nightly
def test_operator_limits_answers(bounded: TestClient) -> None:
    for prompt, wanted in ((5, 40), (CONTEXT - 41, 40), (CONTEXT - 39, 39), (CONTEXT - 3, 3)):
        answer = ask(bounded, completion([5] * prompt, ignore_eos=True))
        assert answer["usage"]["completion_tokens"] == wanted
    answer = ask(bounded, completion([5], model="tiny-dream", ignore_eos=True))
    assert answer["usage"]["completion_tokens"] == 40


def test_longer_answers_are_refused(bounded: TestClient) -> None:
    assert ask(bounded, completion(max_tokens=40, min_tokens=40))
    for fields in ({"max_tokens": 41}, {"min_tokens": 41}, {"max_tokens": 50, "min_tokens": 45}):
        assert refused(bounded, completion(**fields))["param"] == min(fields)
    assert refused(bounded, chat(max_completion_tokens=41))["param"] == "max_completion_tokens"


def post(client: TestClient, route: str, body: Any, status: int = 200) -> dict[str, Any]:
    response = client.post(route, json=body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("body", [chat(max_tokens=1), completion(max_tokens=1)])
def test_tokens_are_those_of_the_prompt(client: TestClient, body: dict[str, Any]) -> None:
    found = post(client, "/tokenize", body)
    llm = LLM("tiny-ar")
    assert found["tokens"] == llm.text.encode(QUESTION)
    assert found["count"] == len(found["tokens"])
    assert found["count"] == ask(client, body)["usage"]["prompt_tokens"]
    listed = client.get("/v1/models/tiny-ar").json()
    assert found["max_model_len"] == listed["max_model_len"] == listed["context_length"] == 512
    text = post(client, "/detokenize", {"model": "tiny-ar", "tokens": found["tokens"]})
    assert text == {"prompt": QUESTION + "\n"}


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x"}, 400, "model"),
        ("/tokenize", {"model": "unknown", "prompt": "x"}, 404, "model"),
        ("/tokenize", {"model": "tiny-ar", "prompt": ""}, 400, "prompt"),
        ("/tokenize", {"model": "tiny-ar", "prompt": ["a", "b"]}, 400, "prompt"),
        ("/tokenize", {"model": "tiny-ar", "messages": []}, 400, "messages"),
        ("/tokenize", chat(x=1), 400, "x"),
        ("/detokenize", {"model": "tiny-ar"}, 400, "tokens"),
        ("/detokenize", {"model": "unknown", "tokens": [1]}, 404, "model"),
        ("/detokenize", {"model": "tiny-ar", "tokens": []}, 400, "tokens"),
        ("/detokenize", {"model": "tiny-ar", "tokens": [1, 2**30]}, 400, "tokens.1"),
    ],
)
def test_invalid_tokens_are_named(
    client: TestClient, route: str, body: Any, status: int, param: str
) -> None:
    assert post(client, route, body, status)["error"]["param"] == param
    assert client.post(route, content="{").status_code == 400


@pytest.mark.parametrize("made", [chat, partial(completion, echo=True, logprobs=2)])
def test_progress_of_a_prompt_has_the_form_of_llama_cpp(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch, made: Any
) -> None:
    engine: Any = service.client
    monkeypatch.setattr(engine.loop.models["tiny-ar"].llm.engine, "max_rows", 16)
    body = made(f"{made} and its twenty words: " + "one two three four " * 5, max_tokens=4, seed=1)
    for caches in (False, True):
        chunks = events(client, body | {"return_progress": True})
        read = [each["prompt_progress"] for each in chunks if "prompt_progress" in each]
        total = read[0]["total"]
        assert {each["total"] for each in read} == {total} == {read[-1]["processed"]}
        assert read == sorted(read, key=itemgetter("processed"))
        assert made is not chat or [each["cache"] > 0 for each in read] == [caches] * len(read)
        assert all(each["time_ms"] >= 0 for each in read)
        plain = events(client, body)
        assert text_of(chunks) == text_of(plain) and "prompt_progress" not in str(plain)
    assert refused(client, body | {"return_progress": True})["param"] == "return_progress"
