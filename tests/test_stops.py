"""Stop ids and stop strings: every answer is the beginning of the one without them."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import enter, finish, runner, tokens
from outpace import LLM
from outpace.api.output import Output
from outpace.decoding import Sampling
from outpace.decoding.processor import MinTokens
from outpace.engine.engine import Engine
from outpace.engine.job import Job
from outpace.methods import FastDLLM, Method
from workload import EOS, KINDS, LONG, ON_ZOO, Request, new_engine, requests

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does Tom have?"
MAX_TOKENS = 40


def submit(
    engine: Engine, request: Request, stop_ids: frozenset[int] = frozenset(), least: int = 0
) -> Job:
    """Queue a request that stops at any of these tokens behind its first `least` ones."""
    return enter(
        engine,
        request.method,
        request.prompt,
        runners={role: runner(engine, name) for role, name in request.roles.items()},
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        eos=EOS,
        stop_ids=stop_ids,
        min_tokens=least,
        processors=(MinTokens(EOS, len(request.prompt) + least),) if least else (),
    )


def run(*asked: tuple[Any, ...], **limits: Any) -> list[Job]:
    """Run requests together in an engine of their own."""
    engine = new_engine(**limits)
    jobs = [submit(engine, *each) for each in asked]
    finish(engine)
    assert all(job.error is None for job in jobs), [job.error for job in jobs]
    return jobs


def cut(free: Job, stop_ids: frozenset[int], least: int = 0) -> tuple[list[int], str | None]:
    """The reference: tokens before the first stop id behind `least` tokens, and the reason."""
    output = tokens(free)
    for place, token in enumerate(output):
        if place >= least and token in stop_ids:
            return output[:place], "stop"
    return output, free.finish_reason


def found(job: Job) -> tuple[list[int], str | None]:
    """Tokens of a request, and why it ended."""
    return tokens(job), job.finish_reason


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("number", "method"), list(enumerate(KINDS)), ids=repr)
def test_each_token_of_an_answer_ends_it_there(
    number: int, method: Method, temperature: float
) -> None:
    request = Request(
        method=method,
        prompt=LONG[: 9 + 7 * (number % 5)],
        max_tokens=20,
        sampling=Sampling(temperature=temperature, seed=number),
    )
    (free,) = run((request,))
    stops = [frozenset([token]) for token in dict.fromkeys(tokens(free))]
    assert stops
    for stop, job in zip(stops, run(*((request, stop) for stop in stops)), strict=True):
        assert found(job) == cut(free, stop)


@pytest.mark.parametrize("pace", ["off", "auto"])
@given(requests, st.frozensets(st.integers(0, 23), max_size=3), st.integers(0, 12))
def test_stop_ids_of_any_request(
    pace: str, request: Request, stops: frozenset[int], least: int
) -> None:
    free, job = (run((request, stop, least), pace=pace)[0] for stop in (frozenset(), stops))
    assert found(job) == cut(free, stops, least)


@pytest.mark.nightly
@given(requests, st.frozensets(st.integers(0, 23), min_size=1, max_size=3), st.integers(0, 12))
def test_stop_ids_of_many_requests(request: Request, stops: frozenset[int], least: int) -> None:
    (free,) = run((request, frozenset(), least))
    job, other, _ = run((request, stops, least), (request, frozenset(), least), (request,))
    (lone,) = run((request, stops, least))
    assert found(other) == found(free)
    assert found(job) == found(lone) == cut(free, stops, least)


@cache
def llm(name: str) -> LLM:
    return LLM(name)


def strings(text: str) -> list[str]:
    """Parts of an answer: within a token, of several, from its beginning, middle and end."""
    places = {0, 1, len(text) // 3, len(text) // 2, max(len(text) - 4, 0)}
    return sorted({text[at : at + size] for at in places for size in (1, 2, 5)} - {""})


def stopped(model: LLM, free: Output, least: int, stop: str) -> str:
    """The reference: text before the first stop string that begins behind `least` tokens."""
    begin = len(model.text.decode(free.ids[:least]))
    at = free.text.find(stop, begin)
    return free.text if at < 0 else free.text[:at]


def check_zoo(name: str, method: Method, temperature: float, least: int, share: int = 1) -> int:
    """Compare answers with stops, alone and batched, with the free one; how many there are.

    Only every `share`-th stop is tried.
    """
    model = llm(name)
    common: dict[str, Any] = {
        "method": method,
        "max_tokens": MAX_TOKENS,
        "temperature": temperature,
        "seed": 1,
        "min_tokens": least,
    }
    (free,) = model.generate(QUESTION, **common)
    assert len(free.ids) > 4
    listed: list[dict[str, Any]] = [{"stop": each} for each in strings(free.text)]
    listed += [{"stop_ids": [each]} for each in sorted(set(free.ids[least:]))[:8]]
    stops = listed[::share]
    together = dict(model.serve((QUESTION, common | each) for each in stops))
    for number, each in enumerate(stops):
        output = together[number]
        assert output.ids == free.ids[: len(output.ids)], (each, free.ids, output.ids)
        if "stop" in each:
            assert output.text == stopped(model, free, least, each["stop"]), each
        else:
            assert len(output.ids) == free.ids.index(each["stop_ids"][0], least)
        assert output.finish_reason == "stop" or output.text == free.text
        if number % 4 == 0:
            (alone,) = model.generate(QUESTION, **common | each)
            assert (alone.ids, alone.text) == (output.ids, output.text)
    return len(stops)


def test_stops_of_fast_dllm() -> None:
    assert check_zoo("tiny-llada", FastDLLM(block=8), 0.0, 0, share=2) > 4


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "method"), ON_ZOO, ids=repr)
def test_some_stops_of_every_method(name: str, method: Method) -> None:
    assert check_zoo(name, method, 0.9, 5, share=5) > 2


@pytest.mark.nightly
@pytest.mark.parametrize("least", [0, 6])
@pytest.mark.parametrize(("name", "method"), ON_ZOO, ids=repr)
def test_stops_of_every_method(name: str, method: Method, least: int) -> None:
    assert sum(check_zoo(name, method, temperature, least) for temperature in (0.0, 0.9)) > 16


def test_special_token_as_a_stop_string() -> None:
    llm = LLM("tiny-ar")
    assert llm.text.tokenizer is not None
    mark = llm.text.tokenizer.special_tokens_map["eos_token"]
    bias = {llm.text.special_ids[mark]: 50.0}
    options: Any = {"ignore_eos": True, "logit_bias": bias, "max_tokens": 9, "temperature": 0.0}
    (free,) = llm.generate(QUESTION, **options)
    (stopped,) = llm.generate(QUESTION, stop=["zz", mark], **options)
    assert (len(free.ids), free.finish_reason) == (9, "length")
    assert (stopped.ids, stopped.finish_reason, stopped.stop_string) == ([], "stop", mark)
    (free,) = llm.generate(QUESTION, temperature=0.0)
    stop = [f"{free.text[-3:]}{mark}", f"a{mark}b"]
    (cut,) = llm.generate(QUESTION, stop=stop, temperature=0.0)
    assert (cut.text, cut.stop_string) == (free.text[:-3], stop[0])
    assert "".join(llm.stream(QUESTION, stop=stop, temperature=0.0)) == cut.text
