"""Requests of all orders and caches in one batch: each gives the same output as alone."""

from itertools import product
from random import Random
from typing import get_args

from helpers import (
    VOCAB,
    diffusion_model,
    engine_of,
    enter,
    finish,
    pages_in_use,
    runner,
    tokens,
    unshifted_model,
)
from outpace.decoding import Sampling
from outpace.decoding.target import HoleOrder
from outpace.engine.engine import Engine, Job
from outpace.methods import D2F, Diffusion, FastDLLM, LeftToRight, Method

MODELS = (("shifted", diffusion_model(seed=1)), ("unshifted", unshifted_model(seed=2)))


def methods() -> list[Method]:
    """Return every order, fixed canvases, every cache with every rule, and two older methods."""
    rules = [{"threshold": 0.4}, {"threshold": None}, {"factor": 1.5}, {"budget": 1.0}]
    return [
        *(Diffusion(order=order) for order in get_args(HoleOrder)),
        *(Diffusion(order=order, steps=8, block=4, canvas=True) for order in get_args(HoleOrder)),
        *(Diffusion(ends=ends, steps=6, block=12) for ends in ("last", "never")),
        Diffusion(order="entropy", order_temperature=0.7),
        *(
            FastDLLM(cache=cache, block=block, **rule)
            for cache, rule, block in product((None, "prefix", "dual"), rules, (3, 12))
        ),
        LeftToRight(tokens=2, window=4, lookahead=6),
        D2F(block=4, confidence=0.6),
    ]


def submit(engine: Engine, number: int, method: Method) -> Job:
    """Queue a request whose prompt, limit and sampling are functions of its number."""
    rng = Random(number)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
    fixed = isinstance(method, Diffusion) and method.steps is not None
    return enter(
        engine,
        method,
        prompt,
        runners={"target": runner(engine, MODELS[number % 2][0])},
        max_tokens=16 if fixed and method.canvas else 12 if fixed else rng.randint(12, 16),
        sampling=Sampling(temperature=rng.choice([0.0, 0.8, 1.5]), top_p=0.9, seed=number),
        eos=frozenset([0]),
    )


def test_sixty_mixed_requests_over_all_orders_and_caches_equal_each_alone() -> None:
    kinds = methods()
    assert len(kinds) > 40
    batch = [kinds[number % len(kinds)] for number in range(60)]
    engine = engine_of(*MODELS, slots=1000)
    together = [submit(engine, number, method) for number, method in enumerate(batch)]
    finish(engine)
    for number, method in enumerate(batch):
        alone = engine_of(*MODELS, slots=200)
        job = submit(alone, number, method)
        finish(alone)
        assert tokens(together[number]) == tokens(job), method
        assert together[number].request.finish_reason == job.request.finish_reason
    assert pages_in_use(engine) == 0
