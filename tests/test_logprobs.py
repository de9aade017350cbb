"""Log-probabilities: of the tokens that are output, in the forward that chose them."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from helpers import whole
from outpace import LLM
from outpace.checkpoints.load import load_model
from outpace.methods import Method, WeDLM
from workload import ON_ZOO, ZOO

STORY = "Omar has 9 coins and gives 3 of them to Ann. How many coins are left?"


@cache
def llm(name: str) -> LLM:
    """A model of the zoo."""
    return LLM(name)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("name", "method"), ON_ZOO, ids=repr)
def test_each_token_has_one(name: str, method: Method, temperature: float) -> None:
    """Beside a neighbour that wants none, and the tokens stay as they are."""
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
    """Recomputed in one forward over the whole text, whatever they were drawn from."""
    options = {"temperature": temperature, "top_k": 8, "max_tokens": 20, "logprobs": True}
    (output,) = llm("tiny-ar").generate(STORY, method=method, **options)
    prompt = llm("tiny-ar").text.encode(STORY)
    ids = [*prompt, *output.ids]
    laws = whole(load_model("tiny-ar"), ids, causal=True).log_softmax(-1)[len(prompt) - 1 : -1]
    expected = laws.gather(-1, torch.tensor(output.ids)[:, None]).squeeze(-1)
    assert output.logprobs == pytest.approx(expected.tolist(), abs=1e-3)


def test_sure_tokens_are_nearly_certain() -> None:
    """A threshold on the probability is one on its logarithm."""
    (output,) = llm("tiny-wedlm").generate(
        "Count from 10 by 5 up to 99.",
        method=WeDLM(confidence=0.9),
        temperature=0.0,
        max_tokens=16,
        logprobs=True,
    )
    assert output.logprobs is not None
    assert sum(each > -0.106 for each in output.logprobs) >= 12


def test_a_stop_string_cuts_them_with_the_tokens() -> None:
    """One for each token up to the one that completed it."""
    (output,) = llm("tiny-ar").generate(
        STORY, stop="=", temperature=0.0, max_tokens=64, logprobs=True
    )
    assert output.finish_reason == "stop"
    assert output.logprobs is not None and len(output.logprobs) == len(output.ids) > 1
