"""Log-probabilities of the tokens of a prompt, beside an answer by every method."""

import pickle
from functools import cache
from typing import Any

import pytest
import torch

from helpers import whole
from outpace import LLM
from outpace.checkpoints.load import load_model
from outpace.errors import ContextError
from outpace.methods import Autoregressive, Method
from refusal import refuses
from thinking import thinking_llm
from workload import ON_ZOO

STORY = "Omar has 9 coins and gives 3 of them to Ann. How many coins are left?"
CAUSAL = [pair for pair in ON_ZOO if pair[0] in ("tiny-ar", "tiny-aux", "tiny-wedlm")]
each_method = pytest.mark.parametrize(("name", "method"), CAUSAL, ids=repr)


@cache
def llm(name: str) -> LLM:
    return LLM(name)


@cache
def distributions(name: str) -> torch.Tensor:
    """Log-probabilities of all tokens at each slot of the story after the first."""
    ids = llm(name).text.encode(STORY)
    logits = whole(load_model(name), ids, causal=True)[:-1, : llm(name).text.vocab_size].clone()
    if llm(name).config.mask_id is not None:
        logits[:, llm(name).config.mask_id] = -1e30
    return logits.log_softmax(-1)


@each_method
def test_scores_of_a_prompt(name: str, method: Method) -> None:
    options: dict[str, Any] = {"method": method, "max_tokens": 12, "temperature": 0.7, "seed": 3}
    ids, laws = llm(name).text.encode(STORY), distributions(name)
    asked: Any = [
        (STORY, {**options, "logprobs": True}),
        (STORY, {**options, "logprobs": True, "top_logprobs": 1, "prompt_logprobs": 4}),
        (STORY, {**options, "prompt_logprobs": 0, "logit_bias": {5: 9.0}}),
    ]
    outputs = dict(llm(name).serve(asked))
    assert outputs[0].ids == outputs[1].ids and outputs[0].prompt_logprobs is None
    assert outputs[0].logprobs == pytest.approx(outputs[1].logprobs, abs=1e-4)
    assert [len(top) for top in outputs[1].top_logprobs or ()] == [1] * len(outputs[1].ids)
    scored = outputs[1].steps[0]
    assert (scored.model, scored.start, scored.rows, scored.committed) == (
        "target",
        0,
        len(ids) - 1,
        0,
    )
    for number, count in ((1, 4), (2, 0)):
        first, *found = pickle.loads(pickle.dumps(outputs[number])).prompt_logprobs
        assert first is None and len(found) == len(ids) - 1
        for law, token, score in zip(laws, ids[1:], found, strict=True):
            assert score == pytest.approx(float(law[token]), abs=1e-3)
            assert abs(score.rank - 1 - int((law > law[token]).sum())) <= 1  # near-ties
            best = law.topk(max(count, 1))
            assert len(score.top) == count
            for (_, value), expected in zip(score.top, best.values.tolist(), strict=False):
                assert value == pytest.approx(expected, abs=1e-3)
            if count and score.rank == 1:
                assert score.top[0][0] == token


@each_method
def test_an_answer_may_have_no_tokens(name: str, method: Method) -> None:
    options: dict[str, Any] = {"method": method, "temperature": 0.0, "prompt_logprobs": 2}
    asked: Any = [
        (STORY, {**options, "max_tokens": 0, "logprobs": True}),
        (STORY, {**options, "max_tokens": 12}),
        ([5], {**options, "max_tokens": 0}),
    ]
    found = dict(llm(name).serve(asked))
    (alone,) = llm(name).generate(STORY, **options, max_tokens=12)
    assert found[1].ids == alone.ids
    scores, expected = found[0].prompt_logprobs or [], alone.prompt_logprobs or []
    assert scores[1:] == pytest.approx(expected[1:], abs=1e-4)
    for output in (found[0], found[2]):
        assert (output.ids, output.text, output.finish_reason) == ([], "", "length")
    assert len(found[0].steps) == 1 and found[0].logprobs == []
    assert found[2].prompt_logprobs == [None] and found[2].steps == []
    assert list(llm(name).stream(STORY, **options, max_tokens=0)) == []


@each_method
def test_scores_of_choices(name: str, method: Method) -> None:
    choices, text = ["6", "6 coins", "Omar has 6 coins left.", ""], llm(name).text
    prompt, common = text.encode(STORY), {"method": method, "temperature": 0.0}
    asked: Any = [(prompt, {**common, "choices": choices, "logprobs": on}) for on in (False, True)]
    forced: Any = {**common, "max_tokens": 0, "prompt_logprobs": 0}
    asked += [(prompt + text.encode_plain(choice), forced) for choice in choices]
    free, scored, *scores = [each for _, each in sorted(llm(name).serve(asked), key=lambda e: e[0])]
    assert free.choice_logprobs is None and scored.ids == free.ids and scored.text in choices
    expected = [sum(each.prompt_logprobs[len(prompt) :]) for each in scores]
    assert scored.choice_logprobs == pytest.approx(
        dict(zip(choices, expected, strict=True)), abs=1e-3
    )


def test_prompt_may_fill_the_context() -> None:
    length = llm("tiny-ar").config.max_length
    (output,) = llm("tiny-ar").generate(
        [[5] * length], method=Autoregressive(), max_tokens=0, prompt_logprobs=0
    )
    assert len(output.prompt_logprobs or ()) == length
    with pytest.raises(ContextError):
        llm("tiny-ar").generate([[5] * (length + 1)], max_tokens=0, prompt_logprobs=0)


def test_long_prompts_without_a_prefix_cache() -> None:
    plain = LLM("tiny-ar", prefix_cache=False, max_rows=32)
    prompt = llm("tiny-ar").text.encode(STORY * 6)
    assert len(prompt) > 64
    asked: Any = [(prompt, {"prompt_logprobs": 1, "max_tokens": 6}), (STORY, {"max_tokens": 6})] * 2
    found = dict(plain.serve(asked))
    for number, output in llm("tiny-ar").serve(asked):
        assert output.ids == found[number].ids
        if number % 2 == 0:
            ours, theirs = output.prompt_logprobs or [], found[number].prompt_logprobs or []
            assert ours[1:] == pytest.approx(theirs[1:], abs=1e-4)


CHOICES = {"choices": ["6", "Omar has 6 coins."], "logprobs": True}


@pytest.mark.parametrize(
    ("model", "options", "param"),
    [
        *(("tiny-ar", {"prompt_logprobs": value}, "prompt_logprobs") for value in (21, -1, 1.5)),
        ("tiny-dream", {"prompt_logprobs": 0}, "prompt_logprobs"),
        ("tiny-block", {"prompt_logprobs": 2}, "prompt_logprobs"),
        *((model, CHOICES, "logprobs") for model in ("tiny-dream", "tiny-block", "open")),
        ("tiny-ar", {**CHOICES, "max_tokens": 4}, "max_tokens"),
    ],
)
def test_invalid_option_is_named(model: str, options: Any, param: str) -> None:
    with refuses(param):
        (thinking_llm("tiny-ar", model) if model == "open" else llm(model)).generate(
            STORY, **options
        )
