"""Every option of every method, given what it cannot be: refused by name, or a request ends."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from time import perf_counter

import pytest

from helpers import finish, pages_in_use
from outpace.decoding import Sampling
from outpace.methods import APD, METHODS, Diffusion, Method
from workload import KINDS, Request, alone, new_engine

ODD = (None, "x", "", float("nan"), float("inf"), -float("inf"), -1, 0, 1, 2, 10**30, 10**400)
ODD += (0.0, 0.5, 1.0, 1.5, 1e-320, 1e308, [], {}, (), True, False, b"x", object(), 2j)
SECONDS = 5
"""Far more than a request takes, far less than one that hangs."""

FIRST = {type(method): method for method in reversed(KINDS)}
CASES = [
    pytest.param(FIRST[kind], option.name, id=f"{name}-{option.name}")
    for name, kind in METHODS.items()
    for option in fields(kind)
]


@pytest.mark.parametrize(("method", "name"), CASES)
def test_odd_values_are_refused_by_name_or_work(method: Method, name: str) -> None:
    """Either when the method is made or the request is submitted; never deep inside."""
    for value in ODD:
        try:
            changed = replace(method, **{name: value})
        except ValueError as error:
            assert name in str(error), (value, error)
            continue
        if name in method.roles:
            assert isinstance(value, str)  # whether there is such a model is not asked here
            continue
        for sampling in (Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=1)):
            ends(Request(method=changed, max_tokens=8, sampling=sampling))


def ends(request: Request) -> None:
    """It is refused with a `ValueError`, or ends within seconds without an error."""
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


@pytest.mark.parametrize("ratio", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_whole_ratios_are_ratios(ratio: int, temperature: float) -> None:
    """The ends of the range that its docstring explains."""
    sampling = Sampling(temperature=temperature, seed=3)
    whole, number = (
        alone(Request(method=APD(verifier="causal", ratio=value), sampling=sampling))
        for value in (ratio, float(ratio))
    )
    assert whole == number and len(whole[0]) > 2


@pytest.mark.parametrize("steps", [10**9, 2**31, 10**30])
def test_a_schedule_that_never_ends_is_refused(steps: int) -> None:
    """Before anything is made of it."""
    began = perf_counter()
    with pytest.raises(ValueError, match=f"steps={steps} are too many for max_tokens=8: give 128"):
        Request(method=Diffusion(steps=steps), max_tokens=8).submit(new_engine())
    assert perf_counter() - began < 1
    assert len(alone(Request(method=Diffusion(steps=128), max_tokens=8))[2]) <= 128


BAD = [
    *({"seed": value} for value in (None, "abc", float("nan"), -0.5, 1.5, True, [])),
    *({"top_k": value} for value in (10**20, float("nan"), 0, -1, 1.5, "x", True, [])),
    *({"top_p": value} for value in (None, 0, 1.5, -1, float("nan"), "x", True, [])),
    *({"temperature": value} for value in (10**400, float("inf"), float("nan"), -1, "x", [])),
]


@pytest.mark.parametrize("given", BAD, ids=lambda given: str(given)[:40])
def test_sampling_that_means_nothing_is_refused(given: dict) -> None:
    """Naming the option."""
    with pytest.raises(ValueError, match=next(iter(given))):
        Sampling(**given)
