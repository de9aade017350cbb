"""Options of a request: their effect on an answer, and invalid values."""

import math
from typing import Any

import numpy as np
import pytest

from outpace import LLM, OptionError
from outpace.api.answer_plan import build_processors
from outpace.api.options import Options, RequestOptions
from outpace.methods import (
    APD,
    D2F,
    Autoregressive,
    DFlash,
    Diffusion,
    FastDLLM,
    Method,
    Speculative,
    WeDLM,
)
from refusal import refuses

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does Tom have?"
LOSSLESS: list[Method] = [
    Speculative(draft="tiny-aux", tokens=3),
    DFlash(draft="tiny-dflash", tokens=4),
]
PENALTIES: dict[str, Any] = {
    "presence_penalty": 0.6,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.2,
    "logit_bias": {220: -1.5},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-ar")


@pytest.fixture(scope="module")
def dream() -> LLM:
    return LLM("tiny-dream")


@pytest.fixture(scope="module")
def wedlm() -> LLM:
    """A causal model that fills masks."""
    return LLM("tiny-wedlm")


def test_a_token_ends_the_answer(llm: LLM) -> None:
    (free,) = llm.generate(QUESTION)
    at = 9
    (cut,) = llm.generate(QUESTION, stop_ids=np.array([free.ids[at]]).tolist())
    assert cut.ids == free.ids[: free.ids.index(free.ids[at])] and cut.finish_reason == "stop"


def test_end_of_sequence_may_be_ignored(llm: LLM) -> None:
    (free,) = llm.generate(QUESTION)
    assert free.finish_reason == "stop"
    (on,) = llm.generate(QUESTION, ignore_eos=True, max_tokens=len(free.ids) + 5)
    assert on.finish_reason == "length" and len(on.ids) == len(free.ids) + 5
    assert on.ids[: len(free.ids)] == free.ids and on.ids[len(free.ids)] in llm.eos


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("llm", Autoregressive()),
        ("llm", LOSSLESS[0]),
        ("wedlm", WeDLM()),
        ("dream", Diffusion(block=8)),
        ("dream", APD(verifier="tiny-aux", window=16, lookahead=8)),
        ("dream", FastDLLM(block=8)),
    ],
)
def test_an_answer_has_its_least_length(
    name: str, method: Method, request: pytest.FixtureRequest
) -> None:
    llm = request.getfixturevalue(name)
    (short,) = llm.generate(QUESTION, method=method, max_tokens=64)
    (long,) = llm.generate(QUESTION, method=method, max_tokens=64, min_tokens=60)
    assert len(short.ids) < 60 <= len(long.ids)
    assert not llm.eos & set(long.ids)


def test_stop_ids_do_not_count_within_the_least_length(llm: LLM) -> None:
    (free,) = llm.generate(QUESTION, min_tokens=12)
    end = free.ids[9]
    (on,) = llm.generate(QUESTION, min_tokens=12, stop_ids=[end])
    later = next((at for at, token in enumerate(free.ids) if token == end and at >= 12), None)
    assert on.ids == free.ids[:later] and end in on.ids and len(on.ids) >= 12


@pytest.mark.sampled
@pytest.mark.parametrize("method", LOSSLESS, ids=repr)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "options",
    [PENALTIES, {"repetition_penalty": 0.7}, {"min_p": 0.2}, {"frequency_penalty": 2.0}],
    ids=str,
)
def test_what_is_lossless_stays_so(
    llm: LLM, method: Method, temperature: float, options: dict[str, Any]
) -> None:
    common = {"temperature": temperature, "seed": 3, "max_tokens": 48, **options}
    (plain,) = llm.generate(QUESTION, method=Autoregressive(), **common)
    (fast,) = llm.generate(QUESTION, method=method, **common)
    assert fast.ids == plain.ids


def test_verified_wedlm_stays_lossless(wedlm: LLM) -> None:
    common: Options = {"max_tokens": 48, **PENALTIES}  # type: ignore[typeddict-item]
    (plain,) = wedlm.generate(QUESTION, method=Autoregressive(), **common)
    (fast,) = wedlm.generate(QUESTION, method=WeDLM(verify=True), **common)
    assert fast.ids == plain.ids and fast.forwards < plain.forwards


def test_penalties_change_the_answer(llm: LLM) -> None:
    (free,) = llm.generate(QUESTION)
    for name, value in [("presence_penalty", 9), ("frequency_penalty", 9)]:
        (other,) = llm.generate(QUESTION, max_tokens=40, **{name: value})  # type: ignore[misc]
        assert other.ids != free.ids
        counts = np.bincount(other.ids)
        assert counts.max() < np.bincount(free.ids).max()
    (other,) = llm.generate(QUESTION, repetition_penalty=5.0, max_tokens=40)
    assert other.ids != free.ids


def test_a_ban_by_bias_holds_for_every_order(dream: LLM, llm: LLM) -> None:
    for one in (llm, dream):
        (free,) = one.generate(QUESTION, max_tokens=32)
        banned = max(set(free.ids), key=free.ids.count)
        (other,) = one.generate(QUESTION, max_tokens=32, logit_bias={banned: -1e4})
        assert banned not in other.ids


def test_min_p_keeps_the_most_probable(llm: LLM) -> None:
    (greedy,) = llm.generate(QUESTION)
    (hot,) = llm.generate(QUESTION, temperature=5.0, min_p=1.0, seed=8)
    assert hot.ids == greedy.ids


def test_a_batch_of_mixed_options_is_each_alone(llm: LLM) -> None:
    mixed: list[Options] = [
        {},
        {"presence_penalty": 2.0, "temperature": 0.7, "seed": 1},
        {"min_tokens": 50},
        {"logit_bias": {30: 3.0}, "method": LOSSLESS[0]},
        {"repetition_penalty": 1.5, "method": LOSSLESS[1]},
    ]
    together = dict(llm.serve((QUESTION, {"max_tokens": 56, **each}) for each in mixed))
    for number, each in enumerate(mixed):
        (alone,) = llm.generate(QUESTION, **{"max_tokens": 56, **each})  # type: ignore[typeddict-item]
        assert together[number].ids == alone.ids


@pytest.mark.parametrize(
    "method", [Diffusion(), FastDLLM(), D2F(), WeDLM()], ids=lambda method: type(method).__name__
)
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_need_an_order(method: Method, name: str) -> None:
    chosen = RequestOptions.of({name: 0.5})
    with refuses(name):
        list(build_processors(chosen, method, 0, frozenset(), 24))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("stop_ids", value) for value in ([-1], [10**30], [1.5], ["a"], [True], None, 3.2)),
        *(("min_tokens", value) for value in (-1, 1.5, None, math.nan, True, "3")),
        *((f"{kind}_penalty", math.nan) for kind in ("presence", "frequency", "repetition")),
        *((f"{kind}_penalty", 1e9) for kind in ("presence", "frequency", "repetition")),
        *((f"{kind}_penalty", "1") for kind in ("presence", "frequency", "repetition")),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        *(("logit_bias", value) for value in ([1], {"a": 1}, {1: "a"}, {1: math.inf}, {-1: 1})),
        *(("logit_bias", value) for value in ({1.5: 1}, {10**9: 1}, None, 3)),
        *(("min_p", value) for value in (-0.1, 1.1, math.nan, "a", True)),
        *(("ignore_eos", value) for value in (1, "yes", None)),
        *(("template", value) for value in (1, [1], None)),
        *(("method", value) for value in ("apd", "x", 3, ("apd",), ("apd", 3), {"apd": {}})),
        ("method", ("speculative", {"draft": "tiny-aux", "ratio": 1})),
        *(("seed", value) for value in ([1, 2], 1.5, "1", True)),
        ("max_tokens", 1.5),
    ],
)
def test_what_means_nothing_is_refused(llm: LLM, name: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        llm.submit(QUESTION, **{name: value})
    assert caught.value.option == name or name == "method"
    assert not llm.driver.inbox


@pytest.mark.parametrize(
    "method",
    [
        Speculative(draft="tiny-aux", tokens=3),
        ("speculative", {"draft": "tiny-aux", "tokens": 3}),
        ["speculative", {"draft": "tiny-aux", "tokens": np.int64(3)}],
    ],
    ids=["method", "pair", "list"],
)
def test_a_method_by_its_name(llm: LLM, method: Any) -> None:
    (output,) = llm.generate(QUESTION, method=method, max_tokens=24)
    assert {step.model for step in output.steps} == {"target", "draft"}
    known = LLM("tiny-ar", method)
    assert known.method == Speculative(draft="tiny-aux", tokens=3)
    assert repr(known) == f"LLM('tiny-ar', {known.method!r})"
    (plain,) = llm.generate(QUESTION, method="autoregressive", max_tokens=24)
    assert plain.ids == output.ids


def test_several_answers_are_those_of_the_next_seeds(llm: LLM) -> None:
    options: Options = {"temperature": 2.0, "max_tokens": 12}
    several = llm.generate([QUESTION, "hi"], n=3, seed=5, **options)
    assert [len(outputs) for outputs in several] == [3, 3]
    for prompt, outputs in zip((QUESTION, "hi"), several, strict=True):
        for seed, output in enumerate(outputs, 5):
            (alone,) = llm.generate(prompt, seed=seed, **options)
            assert alone.ids == output.ids
    assert len({tuple(output.ids) for output in several[0]}) > 1
    ((one,),) = llm.generate(QUESTION, n=np.int64(1), seed=np.int64(5), **options)  # type: ignore[misc, call-overload]
    assert one.ids == several[0][0].ids
