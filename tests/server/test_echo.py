"""Prompts in answers: their text, and the log-probabilities of their tokens."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import PAIRS, QUESTION, ask, chat, completion, events, refused, text_of, token_counts
from outpace import LLM
from outpace.server.service import Service
from server.test_infill_template import TEXT

PROMPT = QUESTION + "\n"
CAUSAL = {"autoregressive", "dflash", "eagle", "lookup", "speculative", "wedlm"}


def joined(chunks: list[dict[str, Any]], index: int) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for choice in [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]:
        for name, values in (choice["logprobs"] or {}).items():
            found.setdefault(name, []).extend(values or ())
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(("model", "method"), PAIRS)
def test_echo_with_every_method(client: TestClient, model: str, method: str) -> None:
    options = {"model": model, "max_tokens": 6, "seed": 2, "outpace": {"method": method}}
    plain = ask(client, completion(PROMPT, n=2, **options))
    body = completion(PROMPT, n=2, echo=True, **options)
    answer = ask(client, body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [PROMPT + choice["text"] for choice in plain["choices"]]
    assert token_counts(answer) == token_counts(plain)
    assert [text_of(events(client, body), index) for index in (0, 1)] == texts
    body["logprobs"] = 2
    if method not in CAUSAL:
        assert refused(client, body)["param"] == "echo"
        return
    answer = ask(client, body)
    streamed = events(client, body)
    for choice in answer["choices"]:
        scores = choice["logprobs"]
        assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
        count = len(scores["tokens"])
        assert count == len(scores["token_logprobs"]) == len(scores["top_logprobs"])
        length = answer["usage"]["prompt_tokens"]
        assert count - length == 6 and "".join(scores["tokens"]) == choice["text"]
        places = zip(scores["text_offset"], scores["tokens"], strict=True)
        assert all(choice["text"].startswith(token, at) for at, token in places)
        assert all(-90 < each <= 0 for each in scores["token_logprobs"][1:])
        assert all(1 <= len(each) <= 2 for each in scores["top_logprobs"][1:])
        found = joined(streamed, choice["index"])
        assert (found["tokens"], found["text_offset"]) == (scores["tokens"], scores["text_offset"])
        assert found["token_logprobs"] == pytest.approx(scores["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize("method", [method for model, method in PAIRS if model == "tiny-ar"])
def test_given_text_is_scored(openai: Any, method: str) -> None:
    official = openai.completions
    asked: Any = {
        "model": "tiny-ar",
        "prompt": PROMPT,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
        "extra_body": {"outpace": {"method": method}},
    }
    longer, answer = (official.create(**asked, max_tokens=count) for count in (1, 0))
    (choice,), usage = answer.choices, answer.usage
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert usage.completion_tokens == 0
    scores, expected = choice.logprobs, longer.choices[0].logprobs
    assert len(scores.tokens) == usage.prompt_tokens and "".join(scores.tokens) == PROMPT
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert getattr(scores, name) == getattr(expected, name)[:-1]
    chunks = [*official.create(**asked, max_tokens=0, stream=True)]
    assert "".join(each.choices[0].text for each in chunks) == PROMPT
    assert [each.choices[0].finish_reason for each in chunks][-1] == "length"
    found = [each.choices[0].logprobs for each in chunks if each.choices[0].logprobs]
    assert [token for each in found for token in each.tokens or ()] == scores.tokens


@pytest.mark.parametrize("count", [0, 3])
def test_prompt_logprobs_have_the_form_of_vllm(
    client: TestClient, service: Service, count: int
) -> None:
    llm: LLM = service.client.loop.models["tiny-ar"].llm
    body = completion(PROMPT, prompt_logprobs=count, max_tokens=2, n=2)
    asked = chat(prompt_logprobs=count, max_tokens=2)
    found = [choice["prompt_logprobs"] for choice in ask(client, body)["choices"]]
    assert found[0] == found[1]
    prompts = [llm.text.encode(PROMPT, raw=True), llm.text.encode(QUESTION)]
    for ids, scores in zip(prompts, (found[0], ask(client, asked)["prompt_logprobs"]), strict=True):
        (expected,) = llm.generate([ids], prompt_logprobs=count, max_tokens=1)
        assert scores[0] is None and len(scores) == len(ids)
        pairs = zip(ids, scores, expected.prompt_logprobs or (), strict=True)
        for token, entry, score in [*pairs][1:]:
            assert score is not None
            assert entry[str(token)] == {
                "logprob": pytest.approx(float(score), abs=1e-4),
                "rank": score.rank,
                "decoded_token": llm.text.decode([token]),
            }
            assert [int(each) for each in entry][:count] == [each for each, _ in score.top]
            assert len(entry) in (count, count + 1) or count == 0 and len(entry) == 1
            ranks = [each["rank"] for each in entry.values()]
            assert ranks[:count] == [*range(1, count + 1)]
    assert "prompt_logprobs" not in ask(client, chat(max_tokens=2))


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("echo", completion(echo=True, suffix="x", model="tiny-dream")),
        ("echo", completion(TEXT, echo=True, outpace={"fill": True}, model="tiny-dream")),
        ("echo", completion(echo=True, logprobs=1, prompt_logprobs=1)),
        ("echo", completion(echo="yes")),
        ("echo", completion(echo=True, logprobs=1, max_tokens=0, model="tiny-dream")),
        ("max_tokens", completion(echo=True, max_tokens=0)),
        ("max_tokens", completion(logprobs=1, max_tokens=0)),
        ("max_completion_tokens", chat(prompt_logprobs=0, max_completion_tokens=0)),
        ("echo", chat(echo=True)),
        ("prompt_logprobs", completion(prompt_logprobs=1, stream=True)),
        ("prompt_logprobs", chat(prompt_logprobs=0, stream=True)),
        ("prompt_logprobs", chat(prompt_logprobs=21)),
        ("prompt_logprobs", chat(prompt_logprobs=True)),
        ("prompt_logprobs", chat(prompt_logprobs=0, model="tiny-dream")),
        ("prompt_logprobs", completion(prompt_logprobs=1, model="tiny-block")),
        ("prompt_logprobs", completion(TEXT, prompt_logprobs=1, outpace={"fill": True})),
    ],
)
def test_invalid_field_is_named(client: TestClient, param: str, body: dict[str, Any]) -> None:
    error = refused(client, body)
    assert error["param"] == param, error
