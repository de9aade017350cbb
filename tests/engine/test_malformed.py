"""Errors of one request end that request only; the others get the right tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import causal_model, engine_of, enter, finish, is_idle, pages_in_use, runner
from outpace.decoding import CAUSAL_KINDS, FULL, Decoding, Forward, Kind, Read, Request, Sampling
from outpace.decoding.sampling import GroupReader, Readout, Sample
from outpace.engine.cache import PAGE_SIZE
from outpace.engine.engine import Engine
from outpace.engine.job import DecodingError, Job
from outpace.methods import APD, Autoregressive, LeftToRight, Method
from workload import Request as Asked
from workload import alone, new_engine, result


@dataclass(frozen=True, kw_only=True)
class Own(Method):
    """Yields a good forward, then the given object, or a forward of the given fields."""

    target_kinds = (*CAUSAL_KINDS, Kind.DIFFUSION)

    asks: Any = field(hash=False)

    def decode(self, request: Request) -> Decoding:
        n = len(request)
        out = yield Forward(ids=request.ids, start=0, predict=[n], pattern=FULL)
        request.commit(out.tokens)
        yield Forward(**self.asks) if isinstance(self.asks, dict) else self.asks


class Broken(Read):
    """A read whose reader behaves as scripted."""

    @classmethod
    def make_reader(cls, reads: Sequence[Any], slots: Any, device: torch.device) -> GroupReader:
        return cls.reader  # type: ignore[attr-defined]


def reads(reader: Any) -> Read:
    return type("Own", (Broken,), {"reader": staticmethod(reader)})()


def raises(logits: Tensor, rows: slice) -> Readout:
    raise RuntimeError("no idea")


class NoNumbers:
    """Fails on every access."""

    def __getattr__(self, name: str) -> Any:
        raise LookupError(name)


GOOD = {"ids": [1], "start": 5}
NAN = float("nan")
FEATURES = torch.zeros(2, 64)
BAD: dict[str, Any] = {
    "nothing": None,
    "a number": 5,
    "something else": NoNumbers(),
    "start half": {"start": 1.5},
    "start nan": {"start": NAN},
    "start none": {"start": None},
    "start negative": {"start": -1},
    "start huge": {"start": 10**30},
    "ids none": {"ids": None},
    "ids text": {"ids": "ab"},
    "ids empty": {"ids": []},
    "ids half": {"ids": [1.5]},
    "ids nested": {"ids": [[1]]},
    "ids huge": {"ids": [10**30]},
    "ids table": {"ids": torch.ones(2, 2)},
    "pattern unknown": {"pattern": "sideways"},
    "pattern half": {"pattern": (0.5, 0.5)},
    "pattern array": {"pattern": np.ones(2)},
    "positions nan": {"positions": [NAN]},
    "positions number": {"positions": 5},
    "reach nan": {"visible_end": NAN, "pattern": FULL},
    "reach text": {"visible_end": "6", "pattern": FULL},
    "predict number": {"predict": 6},
    "predict half": {"predict": [6.5]},
    "predict_from other": {"predict": [6], "predict_from": [5, 5]},
    "predict_from nan": {"predict": [6], "predict_from": [NAN]},
    "predict negative": {"predict": [-6], "predict_from": [5], "read": Sample()},
    "predict huge": {
        "predict": [10**30],
        "predict_from": [5],
        "read": Sample(sampling=Sampling(temperature=1)),
    },
    "read number": {"read": 5},
    "read type": {"read": Sample},
    "read bare": {"read": Read()},
    "read raises": {"read": reads(raises)},
    "read none": {"read": reads(lambda logits, rows: None)},
    "read short": {"read": reads(lambda logits, rows: Readout(torch.zeros(0).long(), {}))},
    "read long": {"read": reads(lambda logits, rows: Readout(torch.zeros(9).long(), {}))},
    "read scores": {"read": Sample(scores=(5,))},  # type: ignore[arg-type]
    "read step": {"read": Sample(sampling=Sampling(temperature=1), step=None)},  # type: ignore[arg-type]
    "model none": {"model": None},
    "model list": {"model": []},
    "context text": {"context": "text"},
    "context given": {"context": FEATURES},
    "features_for nobody": {"features_for": "nobody"},
}


def beside(engine: Engine, methods: Sequence[Method], target: str = "causal") -> list[Job]:
    """Return requests of methods among four others, after checking that these are unaffected."""
    first = Autoregressive() if target == "causal" else LeftToRight(tokens=2)
    around = [
        Asked(method=kind, sampling=Sampling(temperature=t, seed=7))
        for kind in (first, APD(verifier="causal", ratio=0.6))
        for t in (0.0, 1.5)
    ]
    jobs = [request.submit(engine) for request in around[:2]]
    runners = {"target": runner(engine, target)}
    own = [
        enter(engine, method, (3, 1, 4, 1, 5), runners=runners, max_tokens=12) for method in methods
    ]
    jobs += [request.submit(engine) for request in around[2:]]
    finish(engine)
    assert [result(job) for job in jobs] == [alone(request) for request in around]
    assert is_idle(engine)
    return own


@pytest.mark.parametrize("target", ["causal", "diffusion"])
def test_malformed_forwards_end_their_requests_alone(target: str) -> None:
    common = {**GOOD, "predict": [6], "predict_from": [5]}
    forwards = [{**common, **g} if isinstance(g, dict) else g for g in BAD.values()]
    engine = new_engine()
    jobs = beside(engine, [Own(asks=forward) for forward in forwards], target)
    for job, kind in zip(jobs, BAD, strict=True):
        assert isinstance(job.error, DecodingError) and job.has_ended, kind
    beside(engine, [Own(asks=None)], target)


@pytest.mark.parametrize(
    "decode",
    [
        lambda self, request: None,
        lambda self, request: [],
        lambda self, request: iter([Forward(ids=[1], start=0)]),
        lambda self, request: 1 / 0,
        lambda self: None,
    ],
)
def test_non_generator_ends_its_request_alone(decode: Any) -> None:
    kind = type("Odd", (Method,), {"decode": decode})
    (job,) = beside(new_engine(), [kind()])
    assert isinstance(job.error, DecodingError) and "Odd" in str(job.error)


@dataclass(frozen=True, kw_only=True)
class Stubborn(Method):
    """Ignores being closed."""

    def decode(self, request: Request) -> Decoding:
        out = yield Forward(ids=request.ids, start=0)
        request.commit(out.tokens)
        try:
            yield Forward(ids=[99], start=5)
        finally:
            yield Forward(ids=[1], start=5)


def test_a_generator_that_cannot_be_closed_ends_alone() -> None:
    (job,) = beside(new_engine(), [Stubborn()])
    assert isinstance(job.error, DecodingError)


# Logits that are NaN.

POISON = 22
"""A token whose embedding is NaN in the models below."""


def poisoned(value: float) -> Engine:
    """Return an engine whose causal model yields NaN for one token."""
    model = causal_model(seed=1)
    model.embedding.weight[POISON, 3] = value
    model.unembedding.weight[POISON] = 0  # never generated
    return engine_of(("causal", model), slots=64 * PAGE_SIZE)


def ask(engine: Engine, prompt: Sequence[int], count: int = 12, seed: int = 0) -> Job:
    return enter(
        engine,
        Autoregressive(),
        prompt,
        runners={"target": runner(engine, "causal")},
        max_tokens=count,
        sampling=Sampling(temperature=0.8 * (seed % 2), seed=seed),
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("max_rows", [7, 2048])
def test_nan_logits_end_their_request_alone(value: float, max_rows: int) -> None:
    prompts = [[1, 2, 3], [4] * 40, [5, 6] * 20, [7], [8] * 30]
    expected = []
    for seed, prompt in enumerate(prompts):
        engine = poisoned(value)
        job = ask(engine, prompt, seed=seed)
        finish(engine)
        expected.append(job.tokens)
    engine = poisoned(value)
    engine.max_rows = max_rows
    for _ in range(3):
        jobs, bad = [], []
        for seed, prompt in enumerate(prompts):
            jobs.append(ask(engine, prompt, seed=seed))
            bad.append(ask(engine, [1] * (seed * 9) + [POISON] + [2] * 3))
            engine.step()
        finish(engine)
        assert all("finite" in str(job.error) for job in bad)
        assert [job.tokens for job in jobs] == expected
        assert not any(job.error for job in jobs)
        assert pages_in_use(engine) == 0
    assert runner(engine, "causal").cache.memories[0].isfinite().all()


def test_nan_pages_do_not_affect_other_requests() -> None:
    engine = poisoned(float("nan"))
    jobs = [ask(engine, [1] * 33), ask(engine, [3] * 49, count=15), ask(engine, [2])]
    tables = []
    engine.step()
    for job in jobs:
        tables.append(job.tables["target"])
    memory = runner(engine, "causal").cache.memories[0]
    memory[:, :, tables[2].slots[:PAGE_SIZE]] = float("nan")
    finish(engine)
    assert "finite" in str(jobs[2].error)
    for job in jobs[:2]:
        plain = poisoned(float("nan"))
        again = ask(plain, job.prompt, count=job.max_tokens)
        finish(plain)
        assert job.error is None and job.tokens == again.tokens
