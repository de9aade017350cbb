"""Every method gives the tokens of its naive loop, for many of its options."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
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
    Method,
    Speculative,
    WeDLM,
)
from outpace.methods.copies import DRAFT_MATCH

CAUSAL = causal_model(seed=1)
MASKED = masked_model(seed=3)
# One set of weights under causal and full attention, so that both agree sometimes.
DIFFUSION, VERIFIER = diffusion_model(seed=1), causal_model(seed=1)
UNSHIFTED = unshifted_model(seed=2)
BLOCKS = {"blocks": block_model(seed=1), "shifted blocks": block_model(seed=2, shift=1)}
PADDED, SMALL_VERIFIER = diffusion_model(seed=1), causal_model(seed=1, vocab_size=VOCAB - 2)
TARGET, FEATURES = trained_pair()
ADDED = adding_draft(FEATURES)
DEEP, STATES = extended_pair()
NEAR = causal_model(seed=1)
NEAR.norm.weight.add_(torch.randn(32, generator=torch.Generator().manual_seed(0)))
PADDED.unembedding.weight[VOCAB - 2 :] = 0  # padding rows


def run(engine: Engine, method, prompt: list[int], eos: int | None, **roles: str) -> list[int]:
    """Return the tokens of one request."""
    runners = {role: runner(engine, name) for role, name in roles.items()}
    ends = frozenset() if eos is None else frozenset([eos])
    job = enter(engine, method, prompt, runners=runners, max_tokens=TOKENS, eos=ends)
    finish(engine)
    return tokens(job)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return an engine with a runner for each model."""
    return engine_of(
        ("causal", CAUSAL),
        ("masked", MASKED),
        ("diffusion", DIFFUSION),
        ("unshifted", UNSHIFTED),
        ("verifier", VERIFIER),
        ("padded", PADDED),
        ("small", SMALL_VERIFIER),
        ("near", NEAR),
        ("target", TARGET),
        ("features", FEATURES),
        ("added", ADDED),
        *BLOCKS.items(),
        ("deep", DEEP),
        ("states", STATES),
        ("unshifted", UNSHIFTED),
    )


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_autoregressive(engine: Engine, prompt: list[int]) -> None:
    expected = naive.autoregressive(CAUSAL, prompt, TOKENS)
    assert run(engine, Autoregressive(), prompt, None, target="causal") == expected
    eos = newest(expected)
    cut = naive.autoregressive(CAUSAL, prompt, TOKENS, eos)
    assert run(engine, Autoregressive(), prompt, eos, target="causal") == cut
    assert 0 < len(cut) < len(expected) == TOKENS


@pytest.mark.parametrize(
    ("count", "window", "lookahead"),
    list(product((1, 2, 5), (None, 1, 3, 16), (None, 6))),
)
def test_left_to_right(
    engine: Engine, count: int, window: int | None, lookahead: int | None
) -> None:
    method = LeftToRight(tokens=count, window=window, lookahead=lookahead)
    options = {"tokens": count, "window": window, "lookahead": lookahead}
    for prompt in PROMPTS:
        expected = naive.left_to_right(DIFFUSION, prompt, TOKENS, **options)
        assert run(engine, method, prompt, None, target="diffusion") == expected
        eos = newest(expected)
        cut = naive.left_to_right(DIFFUSION, prompt, TOKENS, **options, eos=eos)
        assert run(engine, method, prompt, eos, target="diffusion") == cut
        assert len(cut) < len(expected) == TOKENS


@pytest.mark.parametrize(
    ("ratio", "window", "lookahead"),
    [
        *product((0.0, 0.4, 0.8, 1.0), (None, 3), (None, 6)),
        *product((0.4,), (1, 16), (None, 1, 6)),
        (0.4, 1, 2),
    ],
)
def test_apd(engine: Engine, ratio: float, window: int | None, lookahead: int | None) -> None:
    options = {"ratio": ratio, "window": window, "lookahead": lookahead}
    roles = {"target": "diffusion", "verifier": "verifier"}
    methods = [APD(verifier="", coupling=kind, **options) for kind in ("gumbel", "argmax")]
    for prompt in PROMPTS:
        expected = naive.apd(DIFFUSION, VERIFIER, prompt, TOKENS, **options)
        for method in methods:
            assert run(engine, method, prompt, None, **roles) == expected
        eos = newest(expected)
        cut = naive.apd(DIFFUSION, VERIFIER, prompt, TOKENS, **options, eos=eos)
        assert run(engine, methods[0], prompt, eos, **roles) == cut
        assert len(cut) < len(expected) == TOKENS


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_apd_cuts_vocabularies_to_the_shorter(engine: Engine, ratio: float) -> None:
    method = APD(verifier="", ratio=ratio, window=4)
    roles = {"target": "padded", "verifier": "small"}
    for prompt in PROMPTS:
        expected = naive.apd(PADDED, SMALL_VERIFIER, prompt, TOKENS, ratio=ratio, window=4)
        assert run(engine, method, prompt, None, **roles) == expected


def compare(engine: Engine, method: Method, options: dict, **more: object) -> None:
    """Compare a method with its naive loop on both kinds of models, with and without an end."""
    loop = getattr(naive, next(name for name, kind in METHODS.items() if type(method) is kind))
    for target, model in (("diffusion", DIFFUSION), ("unshifted", UNSHIFTED)):
        expected = loop(model, PROMPTS[1], TOKENS, **options, **more)
        assert run(engine, method, PROMPTS[1], None, target=target) == expected
        assert len(expected) == TOKENS
        eos = newest(expected)
        for canvas in (False, True):
            cut = loop(model, PROMPTS[1], TOKENS, **options, **more, eos=eos, canvas=canvas)
            ours = replace(method, canvas=canvas)
            assert run(engine, ours, PROMPTS[1], eos, target=target) == cut
            assert len(cut) < TOKENS


@pytest.mark.parametrize(
    ("order", "steps", "block", "eps"),
    [
        *product(("confidence", "margin", "entropy", "left_to_right"), (6,), (8, 16), (0.0, 0.05)),
        *product(("confidence",), (4, 16, 20), (4, 16), (0.0, 0.001)),
    ],
)
def test_diffusion(engine: Engine, order: str, steps: int, block: int, eps: float) -> None:
    options = {"order": order, "steps": steps, "block": block, "eps": eps}
    compare(engine, Diffusion(**options), options)


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
        {"rule": "entropy", "entropy_limit": 2.0},
        {"rule": "frechet", "frechet_margin": 0.0},
        {"rule": "klass", "threshold": 0.2, "klass_divergence": 0.05},
        {"rule": "credit", "threshold": 0.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_fast_dllm(engine: Engine, rule: dict, block: int, cache: str | None) -> None:
    options = {**rule, "block": block, "cache": cache}
    compare(engine, FastDLLM(**options), options)


@pytest.mark.parametrize("name", BLOCKS)
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
        {"rule": "entropy", "entropy_limit": 2.0, "order": "entropy"},
        {"rule": "entropy", "entropy_limit": 2.2, "part": 3},
        {"rule": "frechet", "frechet_margin": 0.0},
        {"rule": "klass", "threshold": 0.2, "klass_divergence": 0.05, "order": "margin"},
        {"rule": "credit", "threshold": 0.4, "part": 3},
        {"edit": 0.0, "threshold": 0.2},
        {"edit": 0.3, "threshold": 0.4, "steps": 2, "order": "margin"},
        {"edit": 0.2, "budget": 2.0, "part": 2},
        {"lookahead": 1, "threshold": 0.4},
        {"lookahead": 3, "threshold": 0.3, "order": "margin"},
        {"lookahead": 6, "threshold": None, "steps": 3, "order": "entropy"},
        {"lookahead": 5, "budget": 1.0, "block": 9},
        {"lookahead": 4, "rule": "frechet", "frechet_margin": 0.0},
        {"lookahead": 3, "rule": "klass", "threshold": 0.2, "klass_divergence": 0.05},
        {"lookahead": 3, "rule": "credit", "threshold": 0.4},
    ],
    ids=str,
)
def test_block_diffusion(engine: Engine, name: str, options: dict) -> None:
    for prompt in [*PROMPTS, [3, 1, 4, 1], [5, 9, 2, 6, 5, 3, 5, 8]]:
        expected = naive.block_diffusion(BLOCKS[name], prompt, TOKENS, **options)
        eos = newest(expected)
        cut = naive.block_diffusion(BLOCKS[name], prompt, TOKENS, **options, eos=eos)
        for canvas in (False, True) if "edit" not in options else (False,):
            method = BlockDiffusion(**options, canvas=canvas)
            assert run(engine, method, prompt, None, target=name) == expected
            assert run(engine, method, prompt, eos, target=name) == cut
        assert len(cut) < len(expected) == TOKENS


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    "options",
    [{}, {"threshold": None}, {"threshold": 0.3}, {"threshold": 0.2, "block": 7}],
    ids=str,
)
def test_verified_block_diffusion_has_blocks_of_one(
    engine: Engine, name: str, options: dict
) -> None:
    target = {"target": runner(engine, name)}
    for prompt in [*PROMPTS, [3, 1, 4, 1], [5, MASK, 2, MASK]]:
        plain = naive.block_diffusion(BLOCKS[name], prompt, TOKENS, block=1)
        for eos in (None, newest(plain)):
            ends = frozenset() if eos is None else frozenset([eos])
            method = BlockDiffusion(verify=True, **options)
            job = enter(engine, method, prompt, runners=target, max_tokens=TOKENS, eos=ends)
            finish(engine)
            kept = [step.kept for step in job.request.trace]
            loop = naive.self_verified(BLOCKS[name], prompt, TOKENS, **options, eos=eos)
            assert (tokens(job), kept) == loop
            assert tokens(job) == (plain if eos is None else plain[: plain.index(eos)])
        sampling = Sampling(temperature=0.9, top_p=0.9, seed=7)
        texts = []
        for method in (BlockDiffusion(verify=True, **options), BlockDiffusion(block=1)):
            job = enter(
                engine, method, prompt, runners=target, max_tokens=TOKENS, sampling=sampling
            )
            finish(engine)
            texts.append(tokens(job))
        assert texts[0] == texts[1] != plain


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("canvas", [False, True])
def test_d2f_on_the_blocks_of_a_model(engine: Engine, name: str, canvas: bool) -> None:
    for options in (
        {"confidence": 0.3},
        {"confidence": 0.6, "add": 0.5, "order": "margin"},
        {"rule": "entropy", "entropy_limit": 2.0},
        {"rule": "frechet", "frechet_margin": 0.0},
        {"rule": "klass", "confidence": 0.2, "klass_divergence": 0.1},
        {"rule": "credit", "confidence": 0.4},
    ):
        for prompt in [*PROMPTS, [3, 1, 4, 1], [5, 9, 2, 6, 5, 3, 5, 8]]:
            expected = naive.d2f(BLOCKS[name], prompt, TOKENS, **options, canvas=canvas)
            method = D2F(**options, canvas=canvas)
            assert run(engine, method, prompt, None, target=name) == expected
            eos = newest(expected)
            cut = naive.d2f(BLOCKS[name], prompt, TOKENS, **options, canvas=canvas, eos=eos)
            assert run(engine, method, prompt, eos, target=name) == cut


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
    ],
    ids=str,
)
def test_wedlm(engine: Engine, options: dict, block: bool, clip: bool) -> None:
    methods = [WeDLM(**options, block=block, clip=clip, eager=eager) for eager in (True, False)]
    for prompt in [*PROMPTS, [5, MASK, 2, MASK]]:
        expected = naive.wedlm(MASKED, prompt, TOKENS, **options, block=block, clip=clip)
        eos = newest(expected)
        cut = naive.wedlm(MASKED, prompt, TOKENS, **options, block=block, clip=clip, eos=eos)
        for method in methods:
            assert run(engine, method, prompt, None, target="masked") == expected
            assert run(engine, method, prompt, eos, target="masked") == cut
        assert len(cut) < len(expected) == TOKENS


@pytest.mark.parametrize("options", [{}, {"window": 1}, {"entropy": 2.0, "block": True}], ids=str)
def test_verified_wedlm_is_autoregressive(engine: Engine, options: dict) -> None:
    for prompt in [*PROMPTS, [5, MASK, 2, MASK]]:
        expected = naive.autoregressive(MASKED, prompt, TOKENS)
        eos = newest(expected)
        method = WeDLM(verify=True, **options)
        assert run(engine, method, prompt, None, target="masked") == expected
        cut = naive.autoregressive(MASKED, prompt, TOKENS, eos)
        assert run(engine, method, prompt, eos, target="masked") == cut


def test_comparison_has_long_and_short_runs(engine: Engine) -> None:
    kept = set()
    for ratio in (0.4, 0.8):
        job = enter(
            engine,
            APD(verifier="", ratio=ratio),
            PROMPTS[1],
            runners={"target": runner(engine, "diffusion"), "verifier": runner(engine, "verifier")},
            max_tokens=60,
        )
        finish(engine)
        kept |= {step.kept for step in job.request.trace if step.model == "verifier"}
    assert {1, 2, 3, 4} <= kept


@pytest.mark.parametrize("count", [1, 2, 5, 20])
@pytest.mark.parametrize("draft", ["near", "verifier"])
def test_speculative(engine: Engine, count: int, draft: str) -> None:
    model = {"near": NEAR, "verifier": VERIFIER}[draft]
    for prompt in PROMPTS:

        def loop(eos: int | None, prompt: list[int] = prompt) -> naive.Verified:
            return naive.speculative(CAUSAL, model, prompt, TOKENS, tokens=count, eos=eos)

        method = Speculative(draft="", tokens=count)
        check_verified(engine, method, {"target": "causal", "draft": draft}, prompt, loop)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_speculative_with_copies(engine: Engine, count: int) -> None:
    for prompt in [*PROMPTS, [3, 1, 4] * 4]:

        def loop(eos: int | None, prompt: list[int] = prompt) -> naive.Verified:
            return naive.speculative(
                CAUSAL, NEAR, prompt, TOKENS, tokens=count, match=DRAFT_MATCH, eos=eos
            )

        method = Speculative(draft="", tokens=count, lookup=True)
        check_verified(engine, method, {"target": "causal", "draft": "near"}, prompt, loop)


@pytest.mark.parametrize("block", [1, 2, 4, 5])
@pytest.mark.parametrize("draft", ["features", "added"])
def test_dflash(engine: Engine, draft: str, block: int) -> None:
    for prompt in PROMPTS:

        def loop(eos: int | None, prompt: list[int] = prompt) -> naive.Verified:
            if draft == "added":
                return naive.adding(TARGET, ADDED, prompt, TOKENS, block=block, eos=eos)
            return naive.dflash(TARGET, FEATURES, prompt, TOKENS, block=block, eos=eos)

        method = DFlash(draft="", block=block, tokens=TOKENS)
        check_verified(engine, method, {"target": "target", "draft": draft}, prompt, loop)


@pytest.mark.parametrize(
    ("block", "width", "nodes"), [(5, 2, 8), (5, 3, 40), (3, 4, 3), (2, 2, 2), (1, 3, 9)]
)
def test_dflash_tree(engine: Engine, block: int, width: int, nodes: int) -> None:
    for prompt in PROMPTS:

        def loop(eos: int | None, prompt: list[int] = prompt) -> naive.Verified:
            shape = {"block": block, "width": width, "nodes": nodes}
            return naive.dflash_tree(TARGET, FEATURES, prompt, TOKENS, **shape, eos=eos)

        method = DFlash(draft="", block=block, width=width, nodes=nodes, tokens=TOKENS)
        check_verified(engine, method, {"target": "target", "draft": "features"}, prompt, loop)


@pytest.mark.parametrize(
    ("width", "depth", "nodes"), [(1, 1, 2), (1, 3, 9), (2, 3, 8), (4, 2, 16), (3, 4, 3)]
)
def test_eagle(engine: Engine, width: int, depth: int, nodes: int) -> None:
    for prompt in PROMPTS:

        def loop(eos: int | None, prompt: list[int] = prompt) -> naive.Verified:
            shape = {"width": width, "depth": depth, "nodes": nodes}
            return naive.eagle(DEEP, STATES, prompt, TOKENS, **shape, eos=eos)

        method = Eagle(draft="", width=width, depth=depth, nodes=nodes)
        check_verified(engine, method, {"target": "deep", "draft": "states"}, prompt, loop)


shares = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.95, 1.0])


@given(
    model=st.sampled_from(["diffusion", "unshifted"]),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
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
@settings(max_examples=60, deadline=None)
def test_d2f(
    engine: Engine,
    model: str,
    prompt: list[int],
    options: dict[str, Any],
    max_tokens: int,
    eos: int | None,
) -> None:
    weights = {"diffusion": DIFFUSION, "unshifted": UNSHIFTED}[model]
    expected = naive.d2f(weights, prompt, max_tokens, **options, eos=eos)
    job = enter(
        engine,
        D2F(**options),
        prompt,
        runners={"target": runner(engine, model)},
        max_tokens=max_tokens,
        eos=frozenset() if eos is None else frozenset([eos]),
    )
    finish(engine)
    assert tokens(job) == expected
    whole = max_tokens // options["block"] * options["block"] if options["canvas"] else max_tokens
    assert (job.request.finish_reason == "length") == (len(expected) == whole)


def test_every_method_has_a_naive_loop() -> None:
    assert all(callable(getattr(naive, name)) for name in METHODS)
