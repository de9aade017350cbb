"""Values of every option of every method: refused by its name, or the request ends."""

import warnings
from dataclasses import fields, replace

import numpy as np
import pytest

from helpers import finish, pages_in_use, tokens
from outpace.decoding import OptionError, Sampling
from outpace.field_types import list_options
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
    Lookup,
    Method,
    Speculative,
    WeDLM,
)
from refusal import refuses
from workload import KINDS, Request, alone, missing, new_engine, result

NAN = float("nan")
OUT_OF_RANGE: dict[type[Method], dict[str, list]] = {
    APD: {"ratio": [-0.1, 1.1], "window": [0], "lookahead": [0], "coupling": ["none"]},
    LeftToRight: {"tokens": [0], "window": [0], "lookahead": [-1]},
    Lookup: {"tokens": [0], "match": [0]},
    Speculative: {"tokens": [0, "many"], "verify": ["hope"]},
    DFlash: {"block": [0], "tokens": [0], "confidence_threshold": [-0.1, 1.5]},
    Eagle: {"width": [0, 2.0], "depth": [0, True], "nodes": [1, 65]},
    D2F: {
        "block": [0],
        "add": [-0.1],
        "activate": [1.5],
        "confidence": [NAN],
        "order": ["best"],
        "least": [2],
    },
    BlockDiffusion: {
        "block": [0],
        "part": [-1],
        "steps": [0],
        "threshold": [1.5],
        "budget": [-1.0],
        "canvas": [1],
        "edit": [1.5],
    },
    WeDLM: {"window": [0], "entropy": [-0.1], "penalty": [-1.0], "confidence": [0.0, 1.1]},
    Diffusion: {
        "order": ["best"],
        "steps": [0],
        "block": [0],
        "eps": [1.0],
        "order_temperature": [-1.0],
        "guidance": [-1],
        "ends": ["first"],
    },
    FastDLLM: {
        "threshold": [0.0, 1.1],
        "factor": [0.0],
        "budget": [-0.1],
        "entropy_limit": [-1.0],
        "cache": ["both"],
        "block": [0],
    },
}
UNUSED_BY_VERIFY = {"budget": 1.0, "steps": 2, "order": "margin", "part": 2, "canvas": True}
UNUSED_BY_VERIFY |= {"edit": 0.5}
CONFLICTS = [
    (APD, "least", {"least": 9, "lookahead": 8}),
    (LeftToRight, "lookahead", {"tokens": 4, "lookahead": 3}),
    (Speculative, "tokens", {"verify": "rejection"}),
    (DFlash, "tokens", {"verify": "rejection"}),
    (Eagle, "width", {"width": 8, "depth": 9}),
    (Eagle, "verify", {"verify": "rejection", "width": 2}),
    *((BlockDiffusion, name, {"verify": True, name: v}) for name, v in UNUSED_BY_VERIFY.items()),
    (BlockDiffusion, "canvas", {"edit": 0.5, "canvas": True}),
    (WeDLM, "least", {"least": 2, "verify": True}),
    (FastDLLM, "factor", {"factor": 1.0, "budget": 1.0}),
    (FastDLLM, "budget", {"budget": 1.0, "entropy_limit": 1.0}),
]


@pytest.mark.parametrize("kind", OUT_OF_RANGE)
def test_values_out_of_range_are_refused(kind: type[Method]) -> None:
    for name, values in OUT_OF_RANGE[kind].items():
        for value in values:
            with refuses(name):
                kind(**dict.fromkeys(kind.roles, "other"), **{name: value})


@pytest.mark.parametrize(("kind", "param", "options"), CONFLICTS)
def test_options_in_conflict_are_refused(kind: type[Method], param: str, options: dict) -> None:
    with refuses(param):
        kind(**dict.fromkeys(kind.roles, "other"), **options)


ODD = (None, "x", "", NAN, float("inf"), -float("inf"), -1, 0, 1, 2, 10**30, 10**400)
ODD += (0.0, 0.5, 1.0, 1.5, 1e-320, 1e308, [], {}, (), True, False, b"x", object(), 2j)
LIMITS = (10_000, 1e4, 1e-30, 1e-45, 5e-324, np.float32(0.5))
HUGE = (1e5, 1e30, 1e308, float("inf"), -float("inf"), NAN, 10**30, 10**400, True)
HUGE += (np.float32(3e38), np.float64("nan"), np.float64("inf"), np.bool_(True))
HUGE += (np.longdouble(1e30),)

FIRST = {type(method): method for method in reversed(KINDS)}
CASES = [
    pytest.param(FIRST[kind], option.name, id=f"{name}-{option.name}")
    for name, kind in METHODS.items()
    if kind in FIRST
    for option in fields(kind)
]
FLOATS = [
    case for case in CASES if list_options(type(case.values[0]))[str(case.values[1])].kind is float
]


def test_every_method_has_cases() -> None:
    assert not missing(), missing()


@pytest.mark.sampled
@pytest.mark.parametrize(("method", "name"), CASES)
def test_odd_values_are_refused_by_name_or_work(method: Method, name: str) -> None:
    for value in ODD:
        try:
            changed = replace(method, **{name: value})
        except OptionError as error:
            assert name in str(error), (value, error)
            continue
        if name in method.roles:
            assert isinstance(value, str)  # the model need not exist here
            continue
        for sampling in (Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=1)):
            check_end(Request(method=changed, max_tokens=8, sampling=sampling))


@pytest.mark.sampled
@pytest.mark.parametrize(("method", "name"), FLOATS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_largest_and_least_numbers_work(method: Method, name: str, temperature: float) -> None:
    accepted = 0
    for value in LIMITS:
        try:
            changed = replace(method, **{name: value})
        except OptionError as error:
            assert name in str(error)
            continue
        check_end(Request(method=changed, max_tokens=8, sampling=Sampling(temperature=temperature)))
        accepted += 1
    assert accepted


@pytest.mark.parametrize(
    "method",
    [
        APD(verifier="causal", ratio=5e-324),
        BlockDiffusion(steps=10**30, part=10**30),
        D2F(block=10**30, add=0.0, activate=0.0),
        DFlash(draft="features", block=10**6, tokens=10**30),
        Diffusion(order_temperature=1e4, eps=1e-45),
        Eagle(draft="states", width=1, depth=10**30),
        FastDLLM(factor=1e4),
        LeftToRight(tokens=10**30),
        Lookup(tokens=10**30),
        Speculative(draft="near", tokens=10**30),
        WeDLM(entropy=1e4, penalty=1e4),
    ],
    ids=repr,
)
def test_extreme_values_work(method: Method) -> None:
    for temperature in (0.0, 0.8):
        check_end(Request(method=method, max_tokens=8, sampling=Sampling(temperature=temperature)))


def check_end(request: Request) -> None:
    """Check that a request is refused with a `ValueError`, or ends and frees its memory."""
    engine = new_engine()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "block .* is longer than the", UserWarning)
        try:
            job = request.submit(engine)
        except ValueError:
            return
        finish(engine)
    assert job.error is None, (request, job.error)
    assert pages_in_use(engine) == 0


NUMPY: dict[type, tuple[type[np.generic], ...]] = {
    int: (np.int64, np.int32, np.uint8),
    float: (np.float64, np.float32, np.float16),
    str: (np.str_,),
    bool: (),
}


@pytest.mark.sampled
@pytest.mark.parametrize(("method", "name"), CASES)
def test_numpy_values_become_plain(method: Method, name: str) -> None:
    value = getattr(method, name)
    if value is None:
        option = list_options(type(method))[name]
        value = {int: 1, float: 0.5, str: [*option.words, ""][0]}[option.kind]
    for kind in NUMPY.get(type(value), ()):
        given = kind(value)
        plain = type(value)(given)  # float16 changes the value
        changed = replace(method, **{name: given})
        assert type(getattr(changed, name)) is type(value)
        assert changed == replace(method, **{name: plain})
    if type(value) in (int, bool):
        for wrong in (np.float64(value), np.array([value]), np.bool_(True)):
            with refuses(name):
                replace(method, **{name: wrong})


@pytest.mark.parametrize(("method", "name"), FLOATS)
def test_numbers_out_of_bounds_are_refused(method: Method, name: str) -> None:
    for value in HUGE:
        with refuses(name):
            replace(method, **{name: value})


def test_integer_ratios_equal_their_floats() -> None:
    for ratio in (0, 1):
        whole, number = (
            alone(Request(method=APD(verifier="causal", ratio=value)))
            for value in (ratio, ratio * 1.0)
        )
        assert whole == number and len(whole[0]) > 2


@pytest.mark.parametrize("order", ["entropy", "origin"])
def test_a_schedule_has_a_finest_step(order: str) -> None:
    finest, finer = (
        alone(Request(method=Diffusion(steps=each, order=order, eps=1e-3), max_tokens=8))
        for each in (128, 10**30)
    )
    assert finest == finer and len(finest[0]) > 2


BLOCKS: list[Method] = [
    *(BlockDiffusion(block=4, canvas=canvas, threshold=0.4) for canvas in (False, True)),
    BlockDiffusion(block=4, part=3, steps=2, threshold=None),
    BlockDiffusion(verify=True, threshold=None),
    D2F(block=6, confidence=0.6),
    D2F(),
    *(DFlash(draft=draft, block=4, tokens=3) for draft in ("features", "added")),
    *(Diffusion(block=6, canvas=canvas, steps=5) for canvas in (False, True)),
    *(FastDLLM(block=6, cache=cache) for cache in (None, "prefix", "dual")),
    FastDLLM(block=6, canvas=True, threshold=0.4),
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
    engine = new_engine()
    on = "blocks" if isinstance(method, BlockDiffusion) else None
    lengths = (1, 2, 5, 6, 7, 13)
    asked = [Request(method=method, max_tokens=length, on=on) for length in lengths]
    jobs = [request.submit(engine) for request in asked]
    finish(engine)
    for length, request, job in zip(lengths, asked, jobs, strict=True):
        assert result(job) == alone(request)
        reason = job.finish_reason
        assert reason == "stop" or (reason == "length" and len(tokens(job)) == length)
