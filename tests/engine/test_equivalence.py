"""Equal results: batched or alone, split or whole, paged or not."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import literal
from helpers import engine_of, finish, is_idle, pages_in_use, record_rows, runner
from outpace.decoding import Sampling
from outpace.engine.cache import PAGE_SIZE
from outpace.methods import (
    APD,
    METHODS,
    Autoregressive,
    BlockDiffusion,
    DFlash,
    LeftToRight,
    Lookup,
    Method,
    Speculative,
    WeDLM,
)
from workload import (
    KINDS,
    MODELS,
    Request,
    alone,
    missing,
    new_engine,
    random_request,
    requests,
    result,
    serve,
)

LONG = tuple(range(1, 23)) * 3
SAMPLED = Sampling(temperature=1.5, top_p=0.9, seed=3)


def test_every_registered_method_is_in_the_workload() -> None:
    assert not missing(), missing()


@given(st.lists(requests, min_size=2, max_size=5))
def test_requests_together_equal_each_alone(batch: list[Request]) -> None:
    engine = new_engine()
    assert serve(engine, batch) == [alone(request) for request in batch]
    assert pages_in_use(engine) == 0


@given(st.lists(requests, min_size=1, max_size=4), st.sampled_from([1, 5, 13]))
def test_split_prefills_change_nothing(batch: list[Request], max_rows: int) -> None:
    assert serve(new_engine(max_rows=max_rows), batch) == [alone(request) for request in batch]


@given(requests)
def test_engine_equals_the_literal_implementation(request: Request) -> None:
    seq = request.sequence()
    models = {role: MODELS[name] for role, name in request.roles.items()}
    forwards = literal.decode(request.method, seq, models)
    output, reason, steps = alone(request)
    assert (output, reason) == (seq.tokens, seq.finish_reason)
    assert [(step.model, step.start) for step in steps] == [(f.model, f.start) for f in forwards]


def test_sixty_mixed_requests_equal_each_alone() -> None:
    rng = Random(0)
    batch = [random_request(rng) for _ in range(60)]
    engine = new_engine(slots=400, max_rows=64)
    texts = [found[:2] for found in serve(engine, batch)]  # some lose their memory and begin again
    assert texts == [alone(request)[:2] for request in batch]
    assert is_idle(engine)
    assert {type(request.method) for request in batch} == set(METHODS.values())


@pytest.mark.nightly
def test_a_thousand_mixed_requests_equal_each_alone_and_token_by_token() -> None:
    rng = Random(1)
    batch = [replace(random_request(rng), arrives=rng.randint(0, 600)) for _ in range(1000)]
    count = Counter(type(request.method) for request in batch)
    assert count.keys() == set(METHODS.values()) and min(count.values()) > 20, count
    engine = new_engine(max_rows=128)
    together = serve(engine, batch)
    assert pages_in_use(engine) == 0
    for request, found in zip(batch, together, strict=True):
        assert found == alone(request), request
        if lossless(request.method):
            one = isinstance(request.method, BlockDiffusion)  # then blocks of one token
            method = BlockDiffusion(block=1) if one else Autoregressive()
            plain = replace(request, method=method, on=request.roles["target"])
            assert found[:2] == alone(plain)[:2], request


def lossless(method: Method) -> bool:
    """Return whether the tokens must be those of decoding token by token."""
    return isinstance(method, Lookup) or getattr(method, "verify", None) in ("match", True)


@pytest.mark.parametrize("method", KINDS, ids=lambda method: type(method).__name__)
def test_split_prompt_gives_the_same_tokens(method) -> None:
    request = Request(method=method, prompt=LONG, sampling=SAMPLED)
    other = Request(method=Autoregressive(), max_tokens=20)
    engine = new_engine(max_rows=5)
    rows = record_rows(runner(engine, "causal"))
    assert serve(engine, [request, other]) == [alone(request), alone(other)]
    # Rows with wanted logits are not split: nine proposals, or guesses and a window.
    assert max(rows, default=0) <= {APD: 9, WeDLM: 12}.get(type(method), 5)


def test_bidirectional_forwards_are_never_split() -> None:
    request = Request(method=LeftToRight(), prompt=LONG, max_tokens=2)
    engine = new_engine(max_rows=5)
    rows = record_rows(runner(engine, "diffusion"))
    serve(engine, [request])
    assert rows == [68, 68]


@pytest.mark.sampled
@pytest.mark.parametrize("method", KINDS, ids=lambda method: type(method).__name__)
def test_scattered_pages_change_nothing(method) -> None:
    request = Request(method=method, prompt=LONG, max_tokens=20, sampling=SAMPLED)
    engine = engine_of(*MODELS.items(), slots=16 * PAGE_SIZE)
    for each in engine.runners:
        for page in range(0, 16, 2):
            each.cache.free.move_to_end(page)
    job = request.submit(engine)
    engine.step()
    pages = job.tables["target"].pages
    assert pages != list(range(pages[0], pages[0] + len(pages)))
    finish(engine)
    assert result(job) == alone(request)


@pytest.mark.nightly
@pytest.mark.parametrize("method", KINDS, ids=lambda method: type(method).__name__)
def test_stale_memory_changes_nothing(method) -> None:
    request = Request(method=method, prompt=LONG[:20], max_tokens=20, sampling=SAMPLED)
    engine = new_engine(slots=3 * PAGE_SIZE)
    for each in engine.runners:
        each.cache.memories[0].fill_(float("nan"))
    assert serve(engine, [request, request, request]) == [alone(request)] * 3


def test_both_kinds_of_drafts_serve_one_target() -> None:
    mask = MODELS["added"].config.mask_id
    batch = [
        Request(method=DFlash(draft=draft, tokens=4), prompt=prompt, sampling=sampling)
        for prompt in ((5,), LONG, (*LONG[:20], mask, *LONG[:20]), (mask,) * 18)
        for sampling in (Sampling(), SAMPLED)
        for draft in ("features", "added")
    ]
    engine = new_engine(max_rows=24)
    expected = [alone(request) for request in batch]
    assert serve(engine, batch) == expected and serve(engine, batch) == expected
    plain = [replace(each, method=Autoregressive(), on="rich") for each in batch]
    assert [each[0] for each in expected] == [alone(each)[0] for each in plain]
    assert engine.prefix_stats.hits > len(batch) // 2 and pages_in_use(engine) == 0


def test_adaptive_lengths_change_no_token() -> None:
    adaptive = [Speculative(draft="near"), DFlash(draft="features"), DFlash(draft="added")]
    batch = [
        Request(
            method=method, prompt=LONG[n : 2 * n + 5], max_tokens=30, sampling=sampling, arrives=n
        )
        for method in adaptive
        for n, sampling in enumerate((Sampling(), SAMPLED) * 2)
    ]
    engine = new_engine()
    plain = [replace(request, method=replace(request.method, tokens=4)) for request in batch]
    together = serve(engine, batch)
    assert [ids for ids, *_ in together] == [alone(request)[0] for request in plain]
    paces = engine.controllers
    assert {method for method, *_ in paces} == set(adaptive)
    for pace in paces.values():
        assert pace.cycles > 10 and pace.load.costs.keys() == {"target", "draft"}
        assert max(pace.loads)[0] > 1  # they ran together, with one controller
    assert not new_engine().controllers and serve(engine, plain) and len(paces) == 3
