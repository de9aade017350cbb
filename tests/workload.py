"""Requests of all methods on two tiny models, alone and together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import torch
from hypothesis import strategies as st

from helpers import (
    VOCAB,
    causal_model,
    diffusion_model,
    engine_of,
    finish,
    masked_model,
    runner,
    tokens,
    trained_pair,
)
from outpace.decoding import Sampling, Step
from outpace.decoding import Sequence as Tokens
from outpace.engine.engine import Engine, Job
from outpace.methods import (
    APD,
    D2F,
    Autoregressive,
    DFlash,
    LeftToRight,
    Method,
    Speculative,
    WeDLM,
)

MODELS = {
    "diffusion": diffusion_model(seed=1),
    "causal": masked_model(seed=1),
    "near": causal_model(seed=1),
    **dict(zip(("rich", "features"), trained_pair(), strict=True)),
}
"""The causal model, which fills masks too, is target of some and verifier of others: all read it
in one pass."""
MODELS["near"].norm.weight.add_(torch.randn(32, generator=torch.Generator().manual_seed(0)))

EOS = frozenset([0])


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for, and in which turn of the engine; prompts are token ids."""

    method: Method
    prompt: tuple[int, ...] = (3, 1, 4, 1, 5)
    max_tokens: int = 12
    sampling: Sampling = Sampling()
    arrives: int = 0

    @property
    def roles(self) -> dict[str, str]:
        """Name of the model in each role."""
        target = "diffusion" if self.method.bidirectional else "causal"
        if self.method.feature_roles:
            target = "rich"
        return {"target": target, **self.method.models()}

    def submit(self, engine: Engine, listener: Callable[[Tokens], None] | None = None) -> Job:
        """Queue it."""
        return engine.submit(
            self.method,
            self.prompt,
            runners={role: runner(engine, name) for role, name in self.roles.items()},
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            eos=EOS,
            listener=listener,
        )

    def sequence(self) -> Tokens:
        """The same for a loop without an engine."""
        configs = [MODELS[name].config for name in self.roles.values()]
        masks = [each.mask_id for each in configs if each.bidirectional] + [configs[0].mask_id]
        mask = next((mask for mask in masks if mask is not None), None)
        return Tokens(
            prompt=list(self.prompt),
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            eos=EOS,
            mask_id=-1 if mask is None else mask,
            block=MODELS["features"].config.block,
        )


def new_engine(*, slots: int = 2048, **limits: int) -> Engine:
    """An engine of all models."""
    return engine_of(*MODELS.items(), slots=slots, **limits)


Result = tuple[list[int], str | None, list[Step]]


def result(job: Job) -> Result:
    """Tokens, reason of the end and trace, all but the time that it took."""
    steps = [replace(step, seconds=0.0) for step in job.seq.trace]
    return tokens(job), job.seq.finish_reason, steps


@cache
def alone(request: Request) -> Result:
    """The request with an engine of its own."""
    engine = new_engine()
    job = request.submit(engine)
    finish(engine)
    return result(job)


def serve(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    """All requests, each submitted in the turn in which it arrives."""
    jobs: dict[int, Job] = {}
    turn = 0
    while len(jobs) < len(requests) or not all(job.done for job in jobs.values()):
        for index, request in enumerate(requests):
            if request.arrives == turn:
                jobs[index] = request.submit(engine)
        engine.step()
        turn += 1
        assert turn < 10_000, "a request never ends"
    return [result(jobs[index]) for index in range(len(requests))]


optional = st.one_of(st.none(), st.integers(1, 8))
methods = st.one_of(
    st.just(Autoregressive()),
    st.builds(LeftToRight, tokens=st.integers(1, 3), window=optional, lookahead=st.none()),
    st.builds(LeftToRight, window=optional, lookahead=optional),
    st.builds(
        APD,
        verifier=st.just("causal"),
        ratio=st.sampled_from([0.0, 0.4, 0.8, 1.0]),
        window=optional,
        lookahead=optional,
        coupling=st.sampled_from(["gumbel", "argmax"]),
    ),
    st.builds(
        D2F,
        block=st.integers(1, 8),
        add=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        activate=st.sampled_from([0.0, 0.5, 1.0]),
        confidence=st.sampled_from([0.3, 0.6, 0.9]),
        order=st.sampled_from(["confidence", "margin", "entropy"]),
        canvas=st.booleans(),
    ),
)
verify = st.sampled_from(["match", "rejection"])
methods |= st.one_of(
    st.builds(
        Speculative,
        draft=st.sampled_from(["near", "causal"]),
        tokens=st.integers(1, 6),
        verify=verify,
    ),
    st.builds(
        DFlash,
        draft=st.just("features"),
        block=st.integers(1, 5),
        tokens=st.integers(1, 5),
        verify=verify,
    ),
    st.builds(
        WeDLM,
        window=st.integers(1, 9),
        entropy=st.sampled_from([None, 0.5, 2.0]),
        confidence=st.sampled_from([None, 0.5]),
        block=st.booleans(),
        clip=st.booleans(),
        eager=st.booleans(),
        verify=st.booleans(),
    ),
)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([None, 5]),
    seed=st.integers(0, 99),
)
requests = st.builds(
    Request,
    method=methods,
    prompt=st.lists(st.integers(1, VOCAB - 2), min_size=1, max_size=40).map(tuple),
    max_tokens=st.integers(1, 20),
    sampling=samplings,
    arrives=st.integers(0, 12),
)


def random_request(rng: Random) -> Request:
    """A request of any kind, the same for the same state of `rng`."""
    method: Method = rng.choice(
        [
            Autoregressive(),
            LeftToRight(tokens=rng.randint(1, 3), window=rng.choice([None, 1, 5])),
            APD(
                verifier="causal",
                ratio=rng.choice([0.0, 0.5, 0.9]),
                window=rng.choice([None, 1, 6]),
                lookahead=rng.choice([None, 3, 9]),
                coupling=rng.choice(["gumbel", "argmax"]),
            ),
            Speculative(draft="near", tokens=rng.randint(1, 6)),
            DFlash(draft="features", block=rng.randint(2, 5), tokens=4),
            D2F(
                block=rng.randint(1, 8),
                add=rng.choice([0.0, 0.1, 1.0]),
                confidence=rng.choice([0.3, 0.6, 0.9]),
                order=rng.choice(["confidence", "margin", "entropy"]),
            ),
            WeDLM(window=rng.randint(1, 9), entropy=2.0, verify=rng.random() < 0.3),
        ]
    )
    return Request(
        method=method,
        prompt=tuple(rng.randint(1, VOCAB - 2) for _ in range(rng.randint(1, 30))),
        max_tokens=rng.randint(1, 24),
        sampling=Sampling(
            temperature=rng.choice([0.0, 0.5, 1.5]),
            top_p=rng.choice([1.0, 0.8]),
            top_k=rng.choice([None, 4]),
            seed=rng.randint(0, 9),
        ),
        arrives=rng.randint(0, 60),
    )
