"""Invalid values of every option of every method: refused by name, or the request ends."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from time import perf_counter

import numpy as np
import pytest

from helpers import finish, pages_in_use, tokens
from outpace.decoding import Sampling
from outpace.decoding.target import HoleOrder
from outpace.methods import (
    APD,
    D2F,
    METHODS,
    BlockDiffusion,
    DFlash,
    Diffusion,
    Eagle,
    FastDLLM,
    LeftToRight,
    Method,
    Speculative,
    WeDLM,
)
from outpace.methods.options import method_options
from workload import KINDS, Request, alone, missing, new_engine, result

ODD = (None, "x", "", float("nan"), float("inf"), -float("inf"), -1, 0, 1, 2, 10**30, 10**400)
ODD += (0.0, 0.5, 1.0, 1.5, 1e-320, 1e308, [], {}, (), True, False, b"x", object(), 2j)
SECONDS = 5
"""Far more than a request takes, far less than one that hangs."""

FIRST = {type(method): method for method in reversed(KINDS)}
CASES = [
    pytest.param(FIRST[kind], option.name, id=f"{name}-{option.name}")
    for name, kind in METHODS.items()
    if kind in FIRST
    for option in fields(kind)
]

LOOSE = [
    Speculative(draft="near", tokens=4, verify="fly", fly_window=1),
    DFlash(draft="features", tokens=3, verify="fly", fly_window=1),
    Eagle(draft="states", width=1, depth=3, verify="fly", fly_window=2),
]
RULES = {"entropy_limit": "entropy", "klass_divergence": "klass", "frechet_margin": "frechet"}
"""Options that only one rule has."""

TYPED = [case for case in CASES if case.values[1] not in ("fly_entropy", *RULES)]
TYPED += [
    pytest.param(kind(rule=rule), name, id=f"{kind.__name__} {rule}")
    for kind in (BlockDiffusion, D2F, FastDLLM)
    for name, rule in RULES.items()
]
TYPED += [pytest.param(method, "fly_entropy", id=type(method).__name__) for method in LOOSE]
FLOATS = [
    case
    for case in TYPED
    if method_options(type(case.values[0]))[str(case.values[1])].kind is float
]


def test_every_method_has_cases() -> None:
    assert not missing(), missing()


@pytest.mark.parametrize(("method", "name"), CASES)
def test_odd_values_are_refused_by_name_or_work(method: Method, name: str) -> None:
    for value in ODD:
        try:
            changed = replace(method, **{name: value})
        except ValueError as error:
            assert name in str(error), (value, error)
            continue
        if name in method.roles:
            assert isinstance(value, str)  # the model need not exist here
            continue
        for sampling in (Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=1)):
            ends(Request(method=changed, max_tokens=8, sampling=sampling))


def ends(request: Request) -> None:
    """Check that a request is refused with a `ValueError`, or ends within seconds."""
    engine, began = new_engine(), perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "block .* is longer than the", UserWarning)
        try:
            job = request.submit(engine)
        except ValueError:
            return
        finish(engine)
    assert job.error is None, (request, job.error)
    assert perf_counter() - began < SECONDS
    assert pages_in_use(engine) == 0


HUGE = (1e5, 1e30, 3e38, 1e308, float("inf"), -float("inf"), float("nan"), 10**30, 10**400, True)
HUGE += (
    np.float32(3e38),
    np.float64("nan"),
    np.float64("inf"),
    np.bool_(True),
    np.longdouble(1e30),
)


NUMPY: dict[type, tuple[type[np.generic], ...]] = {
    int: (np.int64, np.int32, np.uint8),
    float: (np.float64, np.float32, np.float16),
    str: (np.str_,),
    bool: (),
}


@pytest.mark.parametrize(("method", "name"), TYPED)
def test_numpy_values_become_plain(method: Method, name: str) -> None:
    value = getattr(method, name)
    if value is None:
        option = method_options(type(method))[name]
        value = {int: 1, float: 0.5, str: [*option.words, ""][0]}[option.kind]
    for kind in NUMPY.get(type(value), ()):
        given = kind(value)
        plain = type(value)(given)  # float16 changes the value
        changed = replace(method, **{name: given})
        assert type(getattr(changed, name)) is type(value)
        assert changed == replace(method, **{name: plain})
        assert repr(changed) == repr(replace(method, **{name: plain}))
    if type(value) in (int, bool):
        for wrong in (np.float64(value), np.array([value]), np.bool_(True)):
            with pytest.raises(ValueError, match=f"^{name} must be "):
                replace(method, **{name: wrong})


@pytest.mark.parametrize(("method", "name"), FLOATS)
def test_numbers_out_of_bounds_are_refused(method: Method, name: str) -> None:
    for value in HUGE:
        with pytest.raises(ValueError, match=f"^{name} must be a number of at most 10000"):
            replace(method, **{name: value})


@pytest.mark.parametrize(("method", "name"), FLOATS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_largest_and_least_numbers_work(method: Method, name: str, temperature: float) -> None:
    accepted = 0
    for value in (10_000, 1e4, 1.0, 1e-30, 1e-45, 5e-324, 0.0, np.float32(0.5)):
        try:
            changed = replace(method, **{name: value})
        except ValueError as error:
            assert name in str(error)
            continue
        assert type(getattr(changed, name)) is float
        ends(Request(method=changed, max_tokens=8, sampling=Sampling(temperature=temperature)))
        accepted += 1
    assert accepted


@pytest.mark.parametrize("ratio", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_integer_ratios_are_accepted(ratio: int, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=3)
    whole, number = (
        alone(Request(method=APD(verifier="causal", ratio=value), sampling=sampling))
        for value in (ratio, float(ratio))
    )
    assert whole == number and len(whole[0]) > 2


@pytest.mark.parametrize("steps", [129, 10**9, 2**31, 10**30])
@pytest.mark.parametrize("order", ["entropy", "origin"])
def test_a_schedule_ends(steps: int, order: HoleOrder) -> None:
    finest, finer = (
        alone(Request(method=Diffusion(steps=each, order=order, eps=1e-3), max_tokens=8))
        for each in (128, steps)
    )
    assert finest == finer and len(finest[0]) > 2


BAD = [
    *({"seed": value} for value in (None, "abc", float("nan"), -0.5, 1.5, True, [])),
    *({"top_k": value} for value in (10**20, float("nan"), 0, -1, 1.5, "x", True, [])),
    *({"top_p": value} for value in (None, 0, 1.5, -1, float("nan"), "x", True, [])),
    *({"temperature": value} for value in (10**400, float("inf"), float("nan"), -1, "x", [])),
]


@pytest.mark.parametrize("given", BAD, ids=lambda given: str(given)[:40])
def test_invalid_sampling_is_refused(given: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        Sampling(**given)


BLOCKS: list[Method] = [
    *(BlockDiffusion(block=4, canvas=canvas, threshold=0.4) for canvas in (False, True)),
    BlockDiffusion(block=4, part=3, steps=2, threshold=None),
    BlockDiffusion(),
    BlockDiffusion(verify=True, threshold=None),
    D2F(block=6, confidence=0.6),
    D2F(),
    *(DFlash(draft=draft, block=4, tokens=3) for draft in ("features", "added")),
    *(
        Diffusion(block=6, canvas=canvas, steps=steps)
        for canvas in (False, True)
        for steps in (None, 5)
    ),
    *(FastDLLM(block=6, cache=cache) for cache in (None, "prefix", "dual")),
    FastDLLM(block=6, canvas=True, threshold=0.4),
    FastDLLM(factor=1.0),
    WeDLM(window=6, block=True, entropy=2.0),
    WeDLM(window=6, verify=True),
    LeftToRight(tokens=3, lookahead=6),
    APD(verifier="causal", lookahead=6, window=4),
    Speculative(draft="near", tokens=5),
    Eagle(draft="states", width=1, depth=4),
    Eagle(draft="states", width=2, depth=3, nodes=8),
]
"""Every method with a block, or with something that may be longer than an answer."""


@pytest.mark.parametrize("method", BLOCKS, ids=repr)
def test_an_answer_may_be_of_any_length(method: Method) -> None:
    lengths = range(1, 2 * 6 + 2)
    engine = new_engine()
    on = "blocks" if isinstance(method, BlockDiffusion) else None
    asked = [Request(method=method, max_tokens=length, on=on) for length in lengths]
    jobs = [request.submit(engine) for request in asked]
    finish(engine)
    for length, request, job in zip(lengths, asked, jobs, strict=True):
        assert job.error is None, (length, job.error)
        assert result(job) == alone(request)
        reason = job.request.finish_reason
        assert reason == "stop" or (reason == "length" and len(tokens(job)) == length)
