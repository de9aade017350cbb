"""Every method gives the tokens of its naive loop, for many of its options."""

from __future__ import annotations

from itertools import product

import pytest

import naive
from helpers import (
    MASK,
    VOCAB,
    causal_model,
    diffusion_model,
    engine_of,
    finish,
    masked_model,
    runner,
    tokens,
)
from outpace.engine.engine import Engine
from outpace.methods import APD, METHODS, Autoregressive, LeftToRight, WeDLM

PROMPTS = [[5], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
TOKENS = 16

CAUSAL = causal_model(seed=1)
MASKED = masked_model(seed=3)
# One set of weights seen with and without later rows, so that both agree now and then.
DIFFUSION, VERIFIER = diffusion_model(seed=1), causal_model(seed=1)
PADDED, SMALL_VERIFIER = diffusion_model(seed=1), causal_model(seed=1, vocab_size=VOCAB - 2)
PADDED.unembedding.weight[VOCAB - 2 :] = 0  # rows that stand for no token


def run(engine: Engine, method, prompt: list[int], eos: int | None, **roles: str) -> list[int]:
    """Tokens of one request."""
    runners = {role: runner(engine, name) for role, name in roles.items()}
    ends = frozenset() if eos is None else frozenset([eos])
    job = engine.submit(method, prompt, runners=runners, max_tokens=TOKENS, eos=ends)
    finish(engine)
    return tokens(job)


def newest(output: list[int]) -> int:
    """The token that comes last for the first time: as end-of-sequence it cuts late."""
    return max(set(output), key=output.index)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """A runner for each model."""
    return engine_of(
        ("causal", CAUSAL),
        ("masked", MASKED),
        ("diffusion", DIFFUSION),
        ("verifier", VERIFIER),
        ("padded", PADDED),
        ("small", SMALL_VERIFIER),
    )


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_autoregressive(engine: Engine, prompt: list[int]) -> None:
    """With and without an end-of-sequence."""
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
    """Tokens, window and lookahead."""
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
    """Ratio, window and lookahead; at temperature 0 both couplings are the same."""
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
    """The verifier's embedding ends before the padding and the mask of the target."""
    method = APD(verifier="", ratio=ratio, window=4)
    roles = {"target": "padded", "verifier": "small"}
    for prompt in PROMPTS:
        expected = naive.apd(PADDED, SMALL_VERIFIER, prompt, TOKENS, ratio=ratio, window=4)
        assert run(engine, method, prompt, None, **roles) == expected


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
    """Window, choice of holes, streaming and blocks; emitted at once or late."""
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
    """Token for token, however many are guessed at a time."""
    for prompt in [*PROMPTS, [5, MASK, 2, MASK]]:
        expected = naive.autoregressive(MASKED, prompt, TOKENS)
        eos = newest(expected)
        method = WeDLM(verify=True, **options)
        assert run(engine, method, prompt, None, target="masked") == expected
        cut = naive.autoregressive(MASKED, prompt, TOKENS, eos)
        assert run(engine, method, prompt, eos, target="masked") == cut


def test_the_comparison_above_sees_long_and_short_runs(engine: Engine) -> None:
    """Otherwise it would say little."""
    kept = set()
    for ratio in (0.4, 0.8):
        job = engine.submit(
            APD(verifier="", ratio=ratio),
            PROMPTS[1],
            runners={"target": runner(engine, "diffusion"), "verifier": runner(engine, "verifier")},
            max_tokens=60,
        )
        finish(engine)
        kept |= {step.kept for step in job.seq.trace if step.model == "verifier"}
    assert {1, 2, 3, 4} <= kept


def test_every_method_has_a_naive_loop() -> None:
    """A new method writes its own."""
    assert all(callable(getattr(naive, name)) for name in METHODS)
