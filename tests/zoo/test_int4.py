"""The models of the package in 4 bits on a CPU."""

from functools import cache
from typing import Any

import pytest

from helpers import needs_packed_loops
from outpace import LLM
from outpace.kernels.packed import BLOCK_FORMATS
from outpace.lab.run import evaluate, questions_of
from outpace.methods import (
    APD,
    D2F,
    Autoregressive,
    BlockDiffusion,
    DFlash,
    Eagle,
    FastDLLM,
    LeftToRight,
    Lookup,
    Method,
    Speculative,
    WeDLM,
)
from outpace.models.int8 import is_quantized
from outpace.models.packed import PackedEmbedding, PackedLinear

pytestmark = needs_packed_loops

GREEDY: dict[str, Any] = {"max_tokens": 64, "temperature": 0.0}
VERIFIED: list[Method] = [
    Lookup(tokens=8),
    Speculative(draft="tiny-aux", tokens=4),
    DFlash(draft="tiny-dflash", tokens=15),
    Eagle(draft="tiny-eagle"),
]
METHODS: dict[str, list[Method]] = {
    "tiny-ar": [Autoregressive(), *VERIFIED],
    "tiny-aux": [Autoregressive()],
    "tiny-dream": [LeftToRight(window=16, lookahead=16), APD(verifier="tiny-aux")],
    "tiny-llada": [LeftToRight(window=16, lookahead=16), FastDLLM()],
    "tiny-d2f": [D2F()],
    "tiny-block": [BlockDiffusion()],
    "tiny-wedlm": [WeDLM(), WeDLM(verify=True)],
}


@cache
def small(name: str) -> LLM:
    return LLM(name, quantize="int4", cache_gib=0.1)


def prompts(count: int) -> list[str]:
    return [question.prompt for question in questions_of("story", count)]


@pytest.mark.parametrize(
    "name",
    [
        "tiny-block",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in METHODS
            if name != "tiny-block"
        ),
    ],
)
def test_mixed_requests_equal_each_alone(name: str) -> None:
    llm = small(name)
    requests = [
        (prompt, {**GREEDY, "method": method, "temperature": 0.7 * (number % 2), "seed": number})
        for method in METHODS[name]
        for number, prompt in enumerate(prompts(4))
    ]
    together = dict(llm.serve(requests, batch=len(requests)))
    assert len(together) == len(requests)
    for number, (prompt, options) in enumerate(requests):
        (alone,) = llm.generate([prompt], **options)
        assert alone.ids == together[number].ids
    for runner in llm.runners.values():
        kinds = {
            kind
            for module in runner.model.modules()
            if isinstance(module, PackedLinear | PackedEmbedding)
            for kind, *_ in module.matrix.parts
        }
        assert is_quantized(runner.model) and BLOCK_FORMATS["INT4"] in kinds


def test_verified_text_is_that_of_the_model_alone() -> None:
    llm = small("tiny-ar")
    alone = llm.generate(prompts(6), method=Autoregressive(), **GREEDY)
    for method in VERIFIED:
        outputs = llm.generate(prompts(6), method=method, **GREEDY)
        assert [each.ids for each in outputs] == [each.ids for each in alone]
        assert sum(each.forwards for each in outputs) < sum(each.forwards for each in alone)


@pytest.mark.sampled
@pytest.mark.parametrize("name", METHODS)
def test_models_solve_held_out_problems(name: str) -> None:
    questions = questions_of("story", 6)
    options: dict[str, Any] = {"method": METHODS[name][0], "max_tokens": 128, "temperature": 0}
    assert evaluate(small(name), questions, batch=6, **options).correct_count >= 4
