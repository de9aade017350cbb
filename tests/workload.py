"""Requests of all methods on tiny models, alone and batched."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any, get_args

import torch
from hypothesis import strategies as st

from helpers import (
    VOCAB,
    adding_draft,
    block_model,
    causal_model,
    convolved_draft,
    corrected_draft,
    diffusion_model,
    engine_of,
    enter,
    extended_pair,
    finish,
    masked_model,
    runner,
    tokens,
    trained_pair,
    unshifted_model,
)
from outpace.decoding import MASKED_DRAFT_KINDS, Kind, Sampling, Step, Verify
from outpace.decoding import Request as Tokens
from outpace.decoding.target import HoleOrder, Rank
from outpace.engine.engine import Engine
from outpace.engine.job import Job
from outpace.engine.pairing import make_target
from outpace.methods import (
    APD,
    D2F,
    METHODS,
    Autoregressive,
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
from outpace.models.transformer import Stack


def new_models() -> dict[str, Stack]:
    """Return targets and further models by name.

    The causal model, which also fills masks, is target of some and verifier of others, so all use
    it in one pass.
    """
    near = causal_model(seed=1)
    near.norm.weight.add_(torch.randn(32, generator=torch.Generator().manual_seed(0)))
    rich, features = trained_pair.__wrapped__()
    return {
        "diffusion": diffusion_model(seed=1),
        "unshifted": unshifted_model(seed=2),
        "blocks": block_model(seed=1),
        "shifted blocks": block_model(seed=2, shift=1),
        "causal": masked_model(seed=1),
        "near": near,
        "rich": rich,
        "features": features,
        "added": adding_draft(features),
        "corrected": corrected_draft(features),
        "convolved": convolved_draft(features),
        **dict(zip(("deep", "states"), extended_pair.__wrapped__(), strict=True)),
    }


MODELS = new_models()

EOS = frozenset([0])

KINDS: list[Method] = [
    Autoregressive(),
    LeftToRight(tokens=2, window=4, lookahead=6),
    APD(verifier="causal", ratio=0.6, window=4, lookahead=9),
    Speculative(draft="near", tokens=3),
    Speculative(draft="near", tokens=4, verify="rejection"),
    DFlash(draft="features", tokens=4),
    DFlash(draft="features", block=3, tokens=2, verify="rejection"),
    DFlash(draft="added", tokens=4),
    DFlash(draft="corrected", tokens=3, confidence_threshold=0.3),
    DFlash(draft="corrected", tokens=4, verify="rejection", confidence_threshold=0.5),
    DFlash(draft="added", tokens=4, lookup=True),
    DFlash(draft="convolved", tokens=4),
    DFlash(draft="convolved", block=4, tokens=3, verify="rejection"),
    DFlash(draft="added", block=4, tokens=3, verify="rejection"),
    Eagle(draft="states", width=2, depth=3, nodes=8),
    Eagle(draft="states", width=1, depth=2, verify="rejection"),
    D2F(block=4, confidence=0.6),
    D2F(confidence=0.6),
    BlockDiffusion(threshold=0.4),
    BlockDiffusion(budget=1.0, order="entropy", part=2, steps=3, canvas=True),
    WeDLM(window=6, entropy=2.0),
    WeDLM(window=6, entropy=2.0, verify=True),
    Diffusion(block=4, steps=15),
    Diffusion(order="entropy", order_temperature=0.7),
    Diffusion(guidance=1.5, ends="last"),
    FastDLLM(threshold=0.4, block=4),
    FastDLLM(budget=1.0, cache="prefix", block=6),
    FastDLLM(entropy_limit=2.0, block=6),
    Lookup(tokens=4, match=1),
    Lookup(tokens=3),
    Speculative(draft="near", tokens=3, lookup=True),
    DFlash(draft="features", tokens=4, lookup=True),
    Eagle(draft="states", width=2, depth=3, nodes=8, lookup=True),
    BlockDiffusion(verify=True, threshold=0.3),
    BlockDiffusion(verify=True, threshold=None),
    BlockDiffusion(edit=0.2, threshold=0.3),
    BlockDiffusion(edit=0.0, threshold=0.3, order="entropy"),
]
"""A few options of each method, for any prompt with 12 or 20 tokens."""


ZOO: dict[str, list[Method]] = {
    "tiny-ar": [
        Autoregressive(),
        Speculative(draft="tiny-aux", tokens=3),
        Speculative(draft="tiny-aux"),
        Speculative(draft="tiny-aux", tokens=3, verify="rejection"),
        DFlash(draft="tiny-dflash", tokens=4),
        Eagle(draft="tiny-eagle", width=1, depth=3),
        Eagle(draft="tiny-eagle", width=3, depth=3, nodes=12),
        Speculative(draft="tiny-aux", tokens=4, verify="rejection", lookup=True),
        DFlash(draft="tiny-dflash", lookup=True),
        Eagle(draft="tiny-eagle", width=3, depth=3, nodes=12, lookup=True),
        Lookup(tokens=5, match=1),
        Lookup(),
    ],
    "tiny-wedlm": [WeDLM(), WeDLM(verify=True), WeDLM(eager=False), WeDLM(block=True, clip=True)],
    "tiny-dream": [
        LeftToRight(tokens=2, window=8, lookahead=16),
        APD(verifier="tiny-aux", window=8, lookahead=16),
        Diffusion(),
        Diffusion(block=8, steps=12, canvas=True),
        Diffusion(order="origin", block=16),
        FastDLLM(block=8),
    ],
    "tiny-llada": [
        Diffusion(),
        Diffusion(block=8, ends="last"),
        FastDLLM(),
        FastDLLM(cache="prefix", block=8),
        FastDLLM(cache=None, factor=1.0, block=16),
        FastDLLM(budget=0.5),
    ],
    "tiny-d2f": [D2F(block=8), D2F(block=8, canvas=True)],
    "tiny-block": [
        BlockDiffusion(),
        BlockDiffusion(steps=2, canvas=True),
        BlockDiffusion(verify=True),
        D2F(),
    ],
}
"""Every registered method with models of the zoo, by target."""

Case = tuple[str, Method]
ON_ZOO: list[Case] = [(name, method) for name, methods in ZOO.items() for method in methods]


def further(cases: list[Case]) -> list[Case]:
    kinds = {type(method) for _, method in cases}
    return [(name, method) for name, method in ON_ZOO if type(method) not in kinds]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A user's request, and the step in which it arrives; prompts are token ids."""

    method: Method
    prompt: tuple[int, ...] = (3, 1, 4, 1, 5)
    max_tokens: int = 12
    sampling: Sampling = Sampling()
    arrives: int = 0
    on: str | None = None

    @property
    def roles(self) -> dict[str, str]:
        """Name of the model in each role; `on` names the target, or it is chosen."""
        return {"target": self.on or self.target, **self.method.model_names()}

    @property
    def target(self) -> str:
        """Name of a model that the method decodes."""
        target = "diffusion" if Kind.DIFFUSION in self.method.target_kinds else "causal"
        if MASKED_DRAFT_KINDS in self.method.roles.values():
            target = "rich"
        if (Kind.EAGLE,) in self.method.roles.values():
            target = "deep"
        if isinstance(self.method, Diffusion) and self.method.guidance:
            target = "unshifted"
        if isinstance(self.method, BlockDiffusion) or (
            isinstance(self.method, D2F) and self.method.block is None
        ):
            target = "blocks" if len(self.prompt) % 2 else "shifted blocks"
        return target

    def submit(self, engine: Engine, listener: Callable[[Tokens], None] | None = None) -> Job:
        return enter(
            engine,
            self.method,
            self.prompt,
            runners={role: runner(engine, name) for role, name in self.roles.items()},
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            eos=EOS,
            listener=listener,
        )

    def sequence(self) -> Tokens:
        """Return the same request for a loop without an engine."""
        return Tokens(
            prompt=list(self.prompt),
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            eos=EOS,
            target=make_target({role: MODELS[name].config for role, name in self.roles.items()}),
        )


LONG = tuple(range(1, 22)) * 2
BATCH = [
    Request(
        method=method,
        prompt=LONG[: 9 + 7 * (n % 5)],
        sampling=Sampling(temperature=0.8 * (n % 2), seed=n),
        arrives=n % 4,
    )
    for n, method in enumerate(KINDS)
]
"""All methods, one after the other, with prompts of different lengths."""


def new_engine(*, slots: int = 2048, **limits: int) -> Engine:
    return engine_of(*MODELS.items(), slots=slots, **limits)


Result = tuple[list[int], str | None, list[Step]]


def result(job: Job) -> Result:
    """Return tokens, finish reason and trace, without times."""
    steps = [replace(step, seconds=0.0) for step in job.trace]
    return tokens(job), job.finish_reason, steps


@cache
def alone(request: Request) -> Result:
    engine = new_engine()
    job = request.submit(engine)
    finish(engine)
    return result(job)


def serve(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    """Run all requests, each submitted in the step in which it arrives."""
    jobs: dict[int, Job] = {}
    turn = 0
    while len(jobs) < len(requests) or not all(job.has_ended for job in jobs.values()):
        for index, request in enumerate(requests):
            if request.arrives == turn:
                jobs[index] = request.submit(engine)
        engine.step()
        turn += 1
        assert turn < 10_000, "a request never ends"
    return [result(jobs[index]) for index in range(len(requests))]


SIZES = (None, *range(1, 9))
RANKS: tuple[Rank, ...] = get_args(Rank)
RULES: tuple[Verify, ...] = ("match", "match", "rejection")


def random_block_diffusion(rng: Random) -> BlockDiffusion:
    options: dict[str, Any] = {
        "threshold": rng.choice([0.2, 0.4, 0.6, 0.9]),
        "steps": rng.choice(SIZES),
        "order": rng.choice(RANKS),
    }
    match rng.randrange(3):
        case 0:
            options["threshold"] = rng.choice([None, 0.4])
            options["order"] = rng.choice([*RANKS, "left_to_right"])
            options |= {"budget": rng.choice([None, 1.0]), "part": rng.choice(SIZES)}
            options["canvas"] = rng.random() < 0.5
        case 1:
            options |= {"edit": rng.choice([0.0, 0.2, 0.6]), "part": rng.choice(SIZES)}
        case _:
            options = {"threshold": rng.choice([None, 0.2, 0.9]), "block": rng.choice(SIZES)}
            options["verify"] = True
    return BlockDiffusion(**options)


def random_eagle(rng: Random) -> Eagle:
    width = rng.choice([1, 2, 4])
    shape = {"width": width, "depth": rng.randint(1 + (width == 1), 4), "nodes": rng.randint(2, 16)}
    if width == 1:
        shape["nodes"] = 16
    verify = rng.choice(RULES) if width == 1 else "match"
    return Eagle(draft="states", **shape, verify=verify, lookup=rng.random() < 0.5)


def random_fast_dllm(rng: Random) -> FastDLLM:
    options: dict[str, Any] = {
        "cache": rng.choice([None, "prefix", "dual"]),
        "block": rng.choice(SIZES),
        "canvas": rng.random() < 0.5,
    }
    match rng.randrange(4):
        case 0:
            options["factor"] = 1.5
        case 1:
            options["budget"] = rng.choice([0.0, 1.0])
        case 2:
            options["threshold"] = rng.choice([None, 0.4, 0.9])
        case _:
            options["entropy_limit"] = rng.choice([0.5, 2.0])
    return FastDLLM(**options)


RANDOM: dict[type[Method], Callable[[Random], Method]] = {
    Autoregressive: lambda rng: Autoregressive(),
    LeftToRight: lambda rng: LeftToRight(
        tokens=rng.randint(1, 3), window=rng.choice(SIZES), lookahead=rng.choice([None, 3, 8])
    ),
    APD: lambda rng: APD(
        verifier="causal",
        ratio=rng.choice([0.0, 0.4, 0.8, 1.0]),
        window=rng.choice(SIZES),
        lookahead=rng.choice(SIZES),
        coupling=rng.choice(["gumbel", "independent", "argmax"]),
    ),
    Lookup: lambda rng: Lookup(tokens=rng.randint(1, 8), match=rng.randint(1, 3)),
    Speculative: lambda rng: Speculative(
        draft=rng.choice(["near", "causal"]),
        tokens=rng.randint(3, 6),
        lookup=rng.random() < 0.5,
        verify=rng.choice(RULES),
    ),
    DFlash: lambda rng: DFlash(
        draft=rng.choice(["features", "added"]),
        block=rng.randint(2, 5),
        tokens=rng.randint(3, 5),
        lookup=rng.random() < 0.5,
        verify=rng.choice(RULES),
    ),
    BlockDiffusion: random_block_diffusion,
    Eagle: random_eagle,
    D2F: lambda rng: D2F(
        block=rng.choice(SIZES),
        add=rng.choice([0.0, 0.1, 0.5, 1.0]),
        activate=rng.choice([0.0, 0.5, 1.0]),
        confidence=rng.choice([0.3, 0.6, 0.9]),
        order=rng.choice(RANKS),
        canvas=rng.random() < 0.5,
    ),
    WeDLM: lambda rng: WeDLM(
        window=rng.randint(1, 9),
        entropy=rng.choice([None, 0.5, 2.0]),
        confidence=rng.choice([None, 0.5]),
        block=rng.random() < 0.5,
        clip=rng.random() < 0.5,
        eager=rng.random() < 0.5,
        verify=rng.random() < 0.5,
    ),
    Diffusion: lambda rng: Diffusion(
        order=rng.choice([None, *get_args(HoleOrder)]),
        steps=rng.choice([None, 1, 4, 12, 60]),
        block=rng.choice([None, 1, 4]),
        eps=rng.choice([None, 0.0, 1e-3]),
        order_temperature=rng.choice([0.0, 0.7]),
        guidance=rng.choice([0.0, 0.0, 1.5]),
        ends=rng.choice(["free", "last", "never"]),
        canvas=rng.random() < 0.5,
    ),
    FastDLLM: random_fast_dllm,
}
"""Every registered method with options from a random state."""


def random_request(rng: Random, latest: int = 60) -> Request:
    """Return a request of any kind, determined by the state of `rng`."""
    while True:
        request = Request(
            method=RANDOM[rng.choice(list(RANDOM))](rng),
            prompt=tuple(rng.randint(1, VOCAB - 2) for _ in range(rng.randint(1, 40))),
            max_tokens=rng.randint(1, 24),
            sampling=Sampling(
                temperature=rng.choice([0.0, 0.7, 2.0]),
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([None, 5]),
                seed=rng.randint(0, 99),
            ),
            arrives=rng.randint(0, latest),
        )
        try:
            request.method.check_request(request.sequence())
        except ValueError:  # the options do not fit the target or the limit of tokens
            continue
        return request


requests = st.randoms(use_true_random=False).map(lambda rng: random_request(rng, latest=12))


def missing() -> str:
    """Return the registered methods that some part of this workload lacks, for a message."""
    parts = {
        "KINDS": {type(method) for method in KINDS},
        "ZOO": {type(method) for _, method in ON_ZOO},
        "RANDOM": set(RANDOM),
    }
    return "; ".join(
        f"{name} of tests/workload.py has no {kind.__name__}: add one"
        for name, kinds in parts.items()
        for kind in METHODS.values()
        if kind not in kinds
    )
