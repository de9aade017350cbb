"""Every method gives the tokens of its naive loop, for many of its options."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import naive
from compared import PROMPTS, TOKENS, check_verified, newest
from helpers import (
    MASK,
    VOCAB,
    adding_draft,
    block_model,
    causal_model,
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
from outpace.decoding import Sampling
from outpace.decoding.target import HoleOrder
from outpace.engine.engine import Engine
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
from outpace.methods.apd import Coupling
from outpace.methods.copies import DRAFT_MATCH
from outpace.methods.fast_dllm import CacheMode
from outpace.models.config import EMBEDDINGS

CAUSAL = causal_model(seed=1)
MASKED = masked_model(seed=3)
# One set of weights under causal and full attention, so that both agree sometimes.
DIFFUSION, VERIFIER = diffusion_model(seed=1), causal_model(seed=1)
UNSHIFTED = unshifted_model(seed=2)
FULL = {"diffusion": DIFFUSION, "unshifted": UNSHIFTED}
BLOCKS = {"blocks": block_model(seed=1), "shifted blocks": block_model(seed=2, shift=1)}
PADDED, SMALL_VERIFIER = diffusion_model(seed=1), causal_model(seed=1, vocab_size=VOCAB - 2)
TARGET, FEATURES = trained_pair()
ADDED, EMBEDDED = adding_draft(FEATURES), copy(FEATURES)
EMBEDDED.config = replace(
    FEATURES.config, feature_layers=(EMBEDDINGS,) * len(FEATURES.config.feature_layers)
)
DEEP, STATES = extended_pair()
NEAR = causal_model(seed=1)
NEAR.norm.weight.add_(torch.randn(32, generator=torch.Generator().manual_seed(0)))
DRAFTS = {"near": NEAR, "verifier": VERIFIER}
PADDED.unembedding.weight[VOCAB - 2 :] = 0  # padding rows


def run(engine: Engine, method, prompt: list[int], eos: int | None, **roles: str) -> list[int]:
    runners = {role: runner(engine, name) for role, name in roles.items()}
    ends = frozenset() if eos is None else frozenset([eos])
    job = enter(engine, method, prompt, runners=runners, max_tokens=TOKENS, eos=ends)
    finish(engine)
    return tokens(job)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of(
        ("causal", CAUSAL),
        ("masked", MASKED),
        *FULL.items(),
        *DRAFTS.items(),
        ("padded", PADDED),
        ("small", SMALL_VERIFIER),
        ("target", TARGET),
        ("features", FEATURES),
        ("added", ADDED),
        ("embedded", EMBEDDED),
        *BLOCKS.items(),
        ("deep", DEEP),
        ("states", STATES),
    )


prompts = pytest.mark.parametrize("prompt", PROMPTS, ids=len)
REPEATED = [3, 1, 4] * 4
EDGES = [*PROMPTS, [3, 1, 4, 1]]
"""Prompts that end within a block of four, and at the end of one."""
MASKS = [*PROMPTS, [5, MASK, 2, MASK]]


def compare(
    engine: Engine, method: Method, prompt: list[int], loop: Callable, **roles: str
) -> None:
    """Compare a method with its loop, which gets an end-of-sequence token or None."""
    expected = loop(eos=None)
    assert len(expected) == TOKENS
    assert run(engine, method, prompt, None, **roles) == expected
    eos = newest(expected)
    cut = loop(eos=eos)
    assert run(engine, method, prompt, eos, **roles) == cut
    assert len(cut) < TOKENS


@prompts
def test_autoregressive(engine: Engine, prompt: list[int]) -> None:
    loop = partial(naive.autoregressive, CAUSAL, prompt, TOKENS)
    compare(engine, Autoregressive(), prompt, loop, target="causal")


@prompts
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("window", [None, 1, 3, 16])
@pytest.mark.parametrize("lookahead", [None, 6])
def test_left_to_right(
    engine: Engine, prompt: list[int], count: int, window: int | None, lookahead: int | None
) -> None:
    options = {"tokens": count, "window": window, "lookahead": lookahead}
    loop = partial(naive.left_to_right, DIFFUSION, prompt, TOKENS, **options)
    compare(engine, LeftToRight(**options), prompt, loop, target="diffusion")


@prompts
@pytest.mark.parametrize("ratio", [0.0, 0.4, 0.8, 1.0])
@pytest.mark.parametrize("window", [None, 1, 3, 16])
@pytest.mark.parametrize("lookahead", [None, 1, 2, 6])
@pytest.mark.parametrize("coupling", ["gumbel", "independent", "argmax"])
def test_apd(
    engine: Engine,
    prompt: list[int],
    ratio: float,
    window: int | None,
    lookahead: int | None,
    coupling: Coupling,
) -> None:
    options = {"ratio": ratio, "window": window, "lookahead": lookahead}
    method = APD(verifier="", coupling=coupling, **options)
    loop = partial(naive.apd, DIFFUSION, VERIFIER, prompt, TOKENS, **options)
    compare(engine, method, prompt, loop, target="diffusion", verifier="verifier")


@prompts
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_apd_cuts_vocabularies_to_the_shorter(
    engine: Engine, prompt: list[int], ratio: float
) -> None:
    method = APD(verifier="", ratio=ratio, window=4)
    expected = naive.apd(PADDED, SMALL_VERIFIER, prompt, TOKENS, ratio=ratio, window=4)
    assert run(engine, method, prompt, None, target="padded", verifier="small") == expected


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("canvas", [False, True])
@pytest.mark.parametrize("order", ["confidence", "margin", "entropy", "left_to_right"])
@pytest.mark.parametrize("steps", [4, 12, 20])
@pytest.mark.parametrize("block", [4, 8, 16])
@pytest.mark.parametrize("eps", [0.0, 0.001, 0.05])
def test_diffusion(
    engine: Engine, name: str, canvas: bool, order: HoleOrder, steps: int, block: int, eps: float
) -> None:
    method = Diffusion(order=order, steps=steps, block=block, eps=eps, canvas=canvas)
    options = {"order": order, "steps": steps, "block": block, "eps": eps, "canvas": canvas}
    loop = partial(naive.diffusion, FULL[name], PROMPTS[1], TOKENS, **options)
    compare(engine, method, PROMPTS[1], loop, target=name)


def test_diffusion_with_guidance(engine: Engine) -> None:
    options = {"order": "confidence", "steps": 8, "block": 8, "guidance": 1.5}
    expected = naive.diffusion(UNSHIFTED, PROMPTS[1], TOKENS, **options)
    assert run(engine, Diffusion(**options), PROMPTS[1], None, target="unshifted") == expected


@pytest.mark.parametrize(
    "rule",
    [
        {"threshold": None},
        {"threshold": 0.3},
        {"threshold": 0.6},
        {"factor": 0.9},
        {"factor": 2.0},
        {"budget": 0.5},
        {"budget": 3.0},
        {"entropy_limit": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("canvas", [False, True])
@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_fast_dllm(
    engine: Engine, rule: dict, name: str, canvas: bool, block: int, cache: CacheMode | None
) -> None:
    options = {**rule, "block": block, "cache": cache, "canvas": canvas}
    loop = partial(naive.fast_dllm, FULL[name], PROMPTS[1], TOKENS, **options)
    compare(engine, FastDLLM(**options), PROMPTS[1], loop, target=name)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("prompt", EDGES, ids=len)
@pytest.mark.parametrize("canvas", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"threshold": None},
        {"threshold": None, "steps": 3, "order": "left_to_right"},
        {"threshold": 0.3, "order": "margin"},
        {"threshold": 0.5, "steps": 2},
        {"threshold": 0.4, "part": 3},
        {"budget": 1.0, "order": "entropy"},
        {"budget": 2.0, "part": 2, "steps": 9},
        {"edit": 0.0, "threshold": 0.2},
        {"edit": 0.3, "threshold": 0.4, "steps": 2, "order": "margin"},
        {"edit": 0.2, "budget": 2.0, "part": 2},
    ],
    ids=str,
)
def test_block_diffusion(
    engine: Engine, name: str, prompt: list[int], canvas: bool, options: dict
) -> None:
    method = BlockDiffusion(**options, canvas=canvas and "edit" not in options)
    loop = partial(naive.block_diffusion, BLOCKS[name], prompt, TOKENS, **options)
    compare(engine, method, prompt, loop, target=name)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("prompt", [*EDGES, MASKS[-1]], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"threshold": None}, {"threshold": 0.2, "block": 7}], ids=str
)
def test_verified_block_diffusion_has_blocks_of_one(
    engine: Engine, name: str, prompt: list[int], options: dict
) -> None:
    target = {"target": runner(engine, name)}
    method = BlockDiffusion(verify=True, **options)
    plain = naive.block_diffusion(BLOCKS[name], prompt, TOKENS, block=1)
    for eos in (None, newest(plain)):
        ends = frozenset() if eos is None else frozenset([eos])
        job = enter(engine, method, prompt, runners=target, max_tokens=TOKENS, eos=ends)
        finish(engine)
        kept = [step.committed for step in job.trace]
        loop = naive.self_verified(BLOCKS[name], prompt, TOKENS, **options, eos=eos)
        assert (tokens(job), kept) == loop
        assert tokens(job) == (plain if eos is None else plain[: plain.index(eos)])
    sampling = Sampling(temperature=0.9, top_p=0.9, seed=7)
    drawn = {"runners": target, "max_tokens": TOKENS, "sampling": sampling}
    jobs = [enter(engine, each, prompt, **drawn) for each in (method, BlockDiffusion(block=1))]
    finish(engine)
    assert tokens(jobs[0]) == tokens(jobs[1]) != plain


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("prompt", EDGES, ids=len)
@pytest.mark.parametrize("canvas", [False, True])
@pytest.mark.parametrize(
    "options", [{"confidence": 0.3}, {"confidence": 0.6, "add": 0.5, "order": "margin"}], ids=str
)
def test_d2f_on_the_blocks_of_a_model(
    engine: Engine, name: str, prompt: list[int], canvas: bool, options: dict
) -> None:
    loop = partial(naive.d2f, BLOCKS[name], prompt, TOKENS, **options, canvas=canvas)
    method, expected = D2F(**options, canvas=canvas), loop()
    assert run(engine, method, prompt, None, target=name) == expected
    eos = newest(expected)
    assert run(engine, method, prompt, eos, target=name) == loop(eos=eos)


@pytest.mark.parametrize("prompt", MASKS, ids=len)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 4, "entropy": None},
        {"window": 8, "entropy": 1.2, "penalty": 0.0},
        {"window": 8, "entropy": 1.5, "penalty": 0.2},
        {"window": 16, "entropy": 2.0},
        {"window": 6, "confidence": 0.5},
        {"window": 4, "entropy": 2.0, "constant": True},
        {"window": 6, "entropy": 1.5, "constant": True, "causal": False},
    ],
    ids=str,
)
def test_wedlm(
    engine: Engine, prompt: list[int], options: dict, block: bool, clip: bool, eager: bool
) -> None:
    method = WeDLM(**options, block=block, clip=clip, eager=eager)
    loop = partial(naive.wedlm, MASKED, prompt, TOKENS, **options, block=block, clip=clip)
    compare(engine, method, prompt, loop, target="masked")


@pytest.mark.parametrize("prompt", MASKS, ids=len)
@pytest.mark.parametrize("options", [{}, {"window": 1}, {"entropy": 2.0, "block": True}], ids=str)
def test_verified_wedlm_is_autoregressive(engine: Engine, prompt: list[int], options: dict) -> None:
    loop = partial(naive.autoregressive, MASKED, prompt, TOKENS)
    compare(engine, WeDLM(verify=True, **options), prompt, loop, target="masked")


def test_apd_accepts_long_and_short_runs(engine: Engine) -> None:
    runners = {"target": runner(engine, "diffusion"), "verifier": runner(engine, "verifier")}
    methods = [APD(verifier="", ratio=ratio) for ratio in (0.4, 0.8)]
    jobs = [enter(engine, each, PROMPTS[1], runners=runners, max_tokens=60) for each in methods]
    finish(engine)
    steps = [step for job in jobs for step in job.trace]
    assert {1, 2, 3, 4} <= {step.committed for step in steps if step.model == "verifier"}


@pytest.mark.parametrize("prompt", [*PROMPTS, REPEATED], ids=len)
@pytest.mark.parametrize("match", [1, 2])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_lookup(engine: Engine, prompt: list[int], match: int, count: int) -> None:
    options = {"tokens": count, "match": match}
    loop = partial(naive.lookup, CAUSAL, prompt, TOKENS, **options)
    check_verified(engine, Lookup(**options), {"target": "causal"}, prompt, loop)


@pytest.mark.parametrize("prompt", [*PROMPTS, REPEATED], ids=len)
@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5, 20])
@pytest.mark.parametrize("draft", DRAFTS)
def test_speculative(
    engine: Engine, prompt: list[int], lookup: bool, count: int, draft: str
) -> None:
    options = {"tokens": count, "match": DRAFT_MATCH * lookup}
    loop = partial(naive.speculative, CAUSAL, DRAFTS[draft], prompt, TOKENS, **options)
    method = Speculative(draft="", tokens=count, lookup=lookup)
    check_verified(engine, method, {"target": "causal", "draft": draft}, prompt, loop)


@prompts
@pytest.mark.parametrize("block", [1, 2, 4, 5])
@pytest.mark.parametrize(
    ("plain", "draft"),
    [(naive.dflash, "features"), (naive.dflash, "embedded"), (naive.adding, "added")],
)
def test_dflash(engine: Engine, prompt: list[int], plain: Callable, draft: str, block: int) -> None:
    model = {"features": FEATURES, "embedded": EMBEDDED, "added": ADDED}[draft]
    loop = partial(plain, TARGET, model, prompt, TOKENS, block=block)
    method = DFlash(draft="", block=block, tokens=TOKENS)
    check_verified(engine, method, {"target": "target", "draft": draft}, prompt, loop)


@prompts
@pytest.mark.parametrize(
    ("width", "depth", "nodes"), [(1, 1, 2), (1, 3, 9), (2, 3, 8), (4, 2, 16), (3, 4, 3)]
)
def test_eagle(engine: Engine, prompt: list[int], width: int, depth: int, nodes: int) -> None:
    shape = {"width": width, "depth": depth, "nodes": nodes}
    loop = partial(naive.eagle, DEEP, STATES, prompt, TOKENS, **shape)
    method = Eagle(draft="", **shape)
    check_verified(engine, method, {"target": "deep", "draft": "states"}, prompt, loop)


shares = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.95, 1.0])


@given(
    name=st.sampled_from(list(FULL)),
    # Of masks alone all rows are equal, and rounding would choose among the holes.
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20).filter(
        lambda prompt: set(prompt) != {MASK}
    ),
    options=st.fixed_dictionaries(
        {
            "block": st.integers(1, 10),
            "add": shares,
            "activate": shares,
            "confidence": shares,
            "order": st.sampled_from(["confidence", "margin", "entropy"]),
            "canvas": st.booleans(),
        }
    ),
    max_tokens=st.integers(1, 30),
    eos=st.none() | st.integers(0, VOCAB - 2),
)
def test_d2f(
    engine: Engine,
    name: str,
    prompt: list[int],
    options: dict[str, Any],
    max_tokens: int,
    eos: int | None,
) -> None:
    expected = naive.d2f(FULL[name], prompt, max_tokens, **options, eos=eos)
    job = enter(
        engine,
        D2F(**options),
        prompt,
        runners={"target": runner(engine, name)},
        max_tokens=max_tokens,
        eos=frozenset() if eos is None else frozenset([eos]),
    )
    finish(engine)
    assert tokens(job) == expected
    whole = max_tokens // options["block"] * options["block"] if options["canvas"] else max_tokens
    assert (job.finish_reason == "length") == (len(expected) == whole)


def test_every_method_has_a_naive_loop() -> None:
    assert all(callable(getattr(naive, name)) for name in METHODS)
