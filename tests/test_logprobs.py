"""Log-probabilities: of the tokens that are output, in the forward that chose them."""

import pickle
from functools import cache
from typing import Any

import pytest
import torch

from helpers import whole
from outpace import LLM, OptionError
from outpace.checkpoints.load import load_model
from outpace.methods import Method
from workload import ON_ZOO, ZOO

STORY = "Omar has 9 coins and gives 3 of them to Ann. How many coins are left?"


@cache
def llm(name: str) -> LLM:
    return LLM(name)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.nightly), 0.7])
@pytest.mark.parametrize(("name", "method"), ON_ZOO, ids=repr)
def test_each_token_has_one(name: str, method: Method, temperature: float) -> None:
    options = {"method": method, "temperature": temperature, "seed": 3, "max_tokens": 24}
    (plain,) = llm(name).generate(STORY, **options)
    asked = [(STORY, options), (STORY, {**options, "logprobs": True})]
    outputs = dict(llm(name).serve(asked))
    assert plain.ids == outputs[0].ids == outputs[1].ids
    assert plain.logprobs is outputs[0].logprobs is None
    logprobs = outputs[1].logprobs
    assert logprobs is not None and len(logprobs) == len(plain.ids) == 24
    assert all(-60 < each <= 0 for each in logprobs)


@pytest.mark.parametrize("method", ZOO["tiny-ar"], ids=repr)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossless_methods_have_those_of_the_target(method: Method, temperature: float) -> None:
    options = {"temperature": temperature, "top_k": 8, "max_tokens": 20, "logprobs": True}
    (output,) = llm("tiny-ar").generate(STORY, method=method, **options)
    prompt = llm("tiny-ar").text.encode(STORY)
    ids = [*prompt, *output.ids]
    laws = whole(load_model("tiny-ar"), ids, causal=True).log_softmax(-1)[len(prompt) - 1 : -1]
    expected = laws.gather(-1, torch.tensor(output.ids)[:, None]).squeeze(-1)
    assert output.logprobs == pytest.approx(expected.tolist(), abs=1e-3)


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.7, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("name", "method"), ON_ZOO, ids=repr)
def test_each_token_has_most_probable_ones(name: str, method: Method, temperature: float) -> None:
    options = {"method": method, "temperature": temperature, "seed": 3, "max_tokens": 16}
    options["logprobs"] = True
    asked = [(STORY, options), *((STORY, {**options, "top_logprobs": n}) for n in (3, 20))]
    outputs = dict(llm(name).serve(asked))
    assert outputs[0].ids == outputs[1].ids == outputs[2].ids
    assert outputs[0].logprobs == outputs[1].logprobs == outputs[2].logprobs
    assert outputs[0].top_logprobs == [()] * 16
    assert outputs[0].logprobs is not None
    for number, count in ((1, 3), (2, 20)):
        found = outputs[number].top_logprobs
        assert found is not None and len(found) == 16
        for token, score, top in zip(outputs[0].ids, outputs[0].logprobs, found, strict=True):
            scores = [each for _, each in top]
            assert len(top) == count and scores == sorted(scores, reverse=True)
            assert score <= scores[0] + 1e-5
            if token in (entries := dict(top)):
                assert entries[token] == pytest.approx(score, abs=1e-5)
            else:
                assert score <= scores[-1] + 1e-5
    assert [top[:3] for top in outputs[2].top_logprobs or ()] == outputs[1].top_logprobs
    assert pickle.loads(pickle.dumps(outputs[1])).top_logprobs == outputs[1].top_logprobs


@pytest.mark.parametrize("method", ZOO["tiny-ar"], ids=repr)
def test_most_probable_tokens_are_those_of_the_target(method: Method) -> None:
    options = {"temperature": 1.0, "max_tokens": 20, "logprobs": True, "top_logprobs": 4}
    (output,) = llm("tiny-ar").generate(STORY, method=method, **options)
    prompt = llm("tiny-ar").text.encode(STORY)
    ids = [*prompt, *output.ids]
    laws = whole(load_model("tiny-ar"), ids, causal=True).log_softmax(-1)[len(prompt) - 1 : -1]
    expected = laws.topk(4, -1)
    assert output.top_logprobs is not None
    tokens = [[token for token, _ in top] for top in output.top_logprobs]
    scores = [[score for _, score in top] for top in output.top_logprobs]
    assert tokens == expected.indices.tolist()
    assert torch.tensor(scores) == pytest.approx(expected.values.numpy(), abs=1e-3)


@pytest.mark.parametrize("count", [-1, 21, True, 2.5, "3", None])
def test_invalid_number_is_named(count: Any) -> None:
    for options in ({"top_logprobs": count, "logprobs": True}, {"top_logprobs": 2}):
        with pytest.raises(OptionError) as caught:
            llm("tiny-ar").generate(STORY, **options)
        assert caught.value.param == "top_logprobs"


def test_a_stop_string_cuts_them_with_the_tokens() -> None:
    (output,) = llm("tiny-ar").generate(
        STORY, stop="=", temperature=0.0, max_tokens=64, logprobs=True
    )
    assert output.finish_reason == "stop"
    assert output.logprobs is not None and len(output.logprobs) == len(output.ids) > 1
