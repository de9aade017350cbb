"""Models with gated delta layers: every method gives the text of plain decoding."""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers import (
    MASK,
    VOCAB,
    adding_draft,
    causal_model,
    engine_of,
    enter,
    extending_draft,
    feature_draft,
    feeds,
    finish,
    hybrid_model,
    is_idle,
    run,
    runner,
    tokens,
    whole,
)
from outpace import LLM
from outpace.checkpoints.load import save_model
from outpace.decoding import FULL, Forward, Sampling, Tree
from outpace.engine import cpu
from outpace.engine.engine import Engine
from outpace.engine.fuse import compile_layers
from outpace.engine.job import Job
from outpace.engine.pairing import MethodSelector
from outpace.engine.prefix_store import PrefixStore
from outpace.engine.recurrent import share_budget, state_bytes
from outpace.engine.runner import Runner
from outpace.kernels.gated_delta import DeltaState, find_delta_loop
from outpace.methods import Autoregressive, DFlash, Eagle, Lookup, Method, Speculative, WeDLM
from outpace.models.split import ModelShard
from outpace.models.transformer import Stack
from outpace.training.weights import check_trainable
from refusal import refuses

OTHER = causal_model(seed=2)
SIZES: dict[str, dict[str, int]] = {
    "torch": {},
    "compiled": {"linear_key_head_dim": 16, "linear_value_head_dim": 32},
}
"""Sizes of layers that run in PyTorch's form, and of those that run in a compiled loop."""


@cache
def models_of(form: str) -> dict[str, Stack]:
    sizes = SIZES[form]
    target = hybrid_model(seed=1, **sizes)
    features = feature_draft(target, seed=3)
    return {
        "target": target,
        "other": OTHER,
        "hybrid": hybrid_model(seed=4, **sizes),
        "features": features,
        "added": adding_draft(features),
        "states": extending_draft(target, seed=5),
    }


TARGET = models_of("torch")["target"]
compiled = pytest.mark.skipif(find_delta_loop() is None, reason="there is no compiled loop")
each_form = pytest.mark.parametrize("form", ["torch", pytest.param("compiled", marks=compiled)])
METHODS: list[Method] = [
    Autoregressive(),
    Lookup(tokens=4),
    Lookup(tokens=30),
    Speculative(draft="other", tokens=3),
    Speculative(draft="hybrid", tokens=5),
    Speculative(draft="hybrid", tokens=14, verify="rejection"),
    Speculative(draft="target", tokens=4),
    DFlash(draft="features", tokens=3),
    DFlash(draft="features"),
    DFlash(draft="added", tokens=4),
    Eagle(draft="states", depth=3),
    Lookup(),
]
TOKENS = 14
SAMPLED = Sampling(temperature=0.7, seed=5)
TEXT = [(7 * slot * slot + 3 * slot + slot // 5) % (VOCAB - 1) for slot in range(140)]


def new_engine(form: str = "torch", **options: Any) -> Engine:
    return engine_of(*models_of(form).items(), **options)


def submit(engine: Engine, method: Method, number: int) -> Job:
    """Queue a request, whose prompt depends on its number."""
    begin, length = 5 * number % 40, (1, 3, 17, 70, 9)[number % 5]
    roles = {"target": "target", **method.model_names()}
    runners = {role: runner(engine, name) for role, name in roles.items()}
    sampling = replace(SAMPLED, seed=number) if number % 3 else Sampling()
    given: dict[str, Any] = {"max_tokens": TOKENS, "sampling": sampling, "eos": frozenset[int]()}
    return enter(engine, method, TEXT[begin : begin + length], runners=runners, **given)


@cache
def alone(method: Method, number: int, form: str = "torch") -> list[int]:
    engine = new_engine(form)
    job = submit(engine, method, number)
    finish(engine)
    return tokens(job)


def is_lossless(method: Method) -> bool:
    """Return whether its text is that of plain decoding with the same seed."""
    return getattr(method, "verify", "match") == "match"


@pytest.mark.parametrize(
    ("form", "max_rows"),
    [
        pytest.param("compiled", 40, marks=compiled),
        pytest.param("torch", 2048, marks=pytest.mark.nightly),
        pytest.param("torch", 13, marks=pytest.mark.nightly),
    ],
)
def test_requests_together_equal_each_alone(form: str, max_rows: int) -> None:
    engine = new_engine(form, max_rows=max_rows)
    given = [(method, number) for number, method in enumerate(METHODS)]
    for _ in range(2):  # the second time from states of the prefix cache
        jobs = [submit(engine, method, number) for method, number in given]
        finish(engine)
        assert is_idle(engine)
        for job, (method, number) in zip(jobs, given, strict=True):
            wanted = Autoregressive() if is_lossless(method) else method
            assert tokens(job) == alone(wanted, number, form), method
        assert {len(tokens(job)) for job in jobs} == {TOKENS}
    target = runner(engine, "target").prefix_cache
    assert target is not None and target.stats.hits >= 4


@each_form
@given(parts=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 12)), min_size=1, max_size=8))
def test_any_split_of_a_text_gives_the_same_logits(form: str, parts: list[tuple[int, int]]) -> None:
    each = Runner("tiny", models_of(form)["target"], slots=512)
    table = each.reserve(len(TEXT) + 20)
    assert table is not None
    wanted, start = whole(hybrid_model(seed=1, **SIZES[form]), TEXT, causal=True), 0
    for count, rejected in parts:
        end = min(start + count, len(TEXT))
        if start == end:
            break
        ids = [*TEXT[start:end], *[(start + 11) % VOCAB] * rejected]
        forward = Forward(ids=ids, start=start, predict=range(start + 1, end + 1))
        forward.read = replace(forward.read, keep=True)
        (found,) = run_settled(each, forward, table, start)
        assert found.logits is not None
        torch.testing.assert_close(found.logits, wanted[start:end], atol=2e-4, rtol=2e-4)
        start = end


@pytest.mark.parametrize(
    ("forward", "match"),
    [
        (Forward(ids=[1, 2], start=3, pattern=FULL), "full"),
        (Forward(ids=[1, 2], start=3, pattern=(1, 1)), r"\(1, 1\)"),
        (Forward(ids=[1, 2], start=3, pattern=Tree(3, (0, 0))), "Tree"),
        (Forward(ids=[1, 2], start=3, positions=[3, 4]), "positions"),
        (Forward(ids=[1, 2], start=30), "30.*40.*53"),
        (Forward(ids=[1, 2], start=54), "53"),
    ],
)
def test_forwards_that_it_cannot_run_are_refused(forward: Forward, match: str) -> None:
    each = Runner("tiny", TARGET, slots=512)
    table = each.reserve(100)
    assert table is not None
    (fed,) = run_settled(each, Forward(ids=TEXT[:53], start=0), table, 40)
    assert len(fed.tokens) == 1
    with pytest.raises(ValueError, match=match):
        run(each, [forward], [table])
    again = Forward(ids=TEXT[:53], start=0)
    assert run(each, [again], [table])[0].tokens == fed.tokens


def run_settled(each: Runner, forward: Forward, table: Any, settled: int) -> list[Any]:
    """Run a forward of a request whose text up to `settled` is committed."""
    fed = feeds(each, [forward], [table])
    fed[0].settled = settled
    return each.run_pass(fed)


@each_form
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2, 3, 8, 25])
def test_a_pass_that_fails_in_the_middle_runs_again(
    call: int, error: type[BaseException], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name = (DeltaState, "extend") if form == "torch" else (cpu, "run_recurrent")
    plain, calls = getattr(where, name), 0

    def fail_once(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        found = plain(*given)
        if calls == call:
            raise error("once")
        return found

    numbers = [(METHODS[0], 3), (METHODS[4], 8), (METHODS[1], 2)]
    wanted = [alone(Autoregressive(), number, form) for _, number in numbers]
    monkeypatch.setattr(where, name, fail_once)
    engine = new_engine(form, max_rows=40)
    jobs = [submit(engine, method, number) for method, number in numbers]
    for _ in range(3):
        try:
            finish(engine)
        except KeyboardInterrupt:
            continue
    assert calls >= call
    found = [job.tokens for job in jobs if job.error is None]
    assert found == [text for job, text in zip(jobs, wanted, strict=True) if job.error is None]
    # A pass of one request that fails ends it.
    assert len(found) >= (2 if error is RuntimeError else 3)


def test_admission_waits_for_states() -> None:
    config = TARGET.config
    size = state_bytes(config, torch.float32)
    sizes = share_budget(config, torch.float32, 4 * size, 50)
    assert sizes["sequences"] == 2
    assert share_budget(config, torch.float32, 10**9, 3)["sequences"] == 6
    assert share_budget(OTHER.config, torch.float32, 10**6, 3)["sequences"] is None
    with refuses("cache_gib"):
        share_budget(config, torch.float32, 4 * size - 1, 50)
    engine = Engine()
    engine.add_runner(Runner("target", TARGET, slots=2048, sequences=2))
    method = Speculative(draft="target", tokens=3)
    jobs = [submit(engine, method, number) for number in range(4)]
    most = 0
    while engine.step():
        most = max(most, len(engine.running))
    assert most == 1 and engine.runners[0].cache.num_tables == 0
    assert [tokens(job) for job in jobs] == [alone(Autoregressive(), n) for n in range(4)]


def test_methods_and_options_that_need_attention_are_refused(tmp_path: Path) -> None:
    target, draft = str(tmp_path / "target"), str(tmp_path / "draft")
    save_model(hybrid_model(seed=1), target)
    save_model(extending_draft(hybrid_model(seed=1)), draft)
    opened = MethodSelector.open(target)
    with refuses("method"):
        opened.open_models(Eagle(draft=draft, width=2))
    assert opened.open_models(Eagle(draft=draft))
    with refuses("method"):
        opened.open_models(WeDLM())
    with refuses("mask_id"):
        LLM(target, mask_id=MASK)
    for refused in (
        lambda: ModelShard(0, 2).shard_config(TARGET.config),
        lambda: compile_layers(TARGET),
        lambda: check_trainable(TARGET.config),
    ):
        with pytest.raises(ValueError, match="delta"):
            refused()


def prefix_runner(slots: int = 2048, **options: Any) -> Engine:
    engine = Engine()
    engine.add_runner(Runner("target", TARGET, slots=slots, **options))
    return engine


def ask(engine: Engine, prompt: list[int], method: Method | None = None) -> tuple[list[int], int]:
    """Return the answer to a prompt, and how many of its rows were skipped."""
    cache = engine.runners[0].prefix_cache
    before = 0 if cache is None else cache.stats.slots
    roles = {"target": engine.runners[0]}
    given = {"max_tokens": TOKENS, "eos": frozenset[int](), "sampling": Sampling()}
    job = enter(engine, method or Autoregressive(), prompt, runners=roles, **given)
    finish(engine)
    return tokens(job), 0 if cache is None else cache.stats.slots - before


def test_a_prompt_continues_at_the_last_state_of_its_prefix() -> None:
    cached, plain = prefix_runner(), prefix_runner(prefix_cache=False)
    other = [(slot * 5 + 2) % VOCAB for slot in range(40)]
    for prompt, skipped in [
        (TEXT[:70], 0),
        (TEXT[:70], 64),
        (TEXT[:120], 64),
        (TEXT[:121], 112),
        (TEXT[:50] + other, 0),  # the pages are there, and no state
        (TEXT[:50] + other[::-1], 48),
        (TEXT[:50], 48),
        (TEXT[:15], 0),
        (TEXT[:48], 0),  # its last row must run
        (other, 0),
    ]:
        found, count = ask(cached, prompt)
        assert (found, count) == (ask(plain, prompt)[0], skipped), len(prompt)
    answer, skipped = ask(cached, TEXT[:100], Lookup(tokens=30))
    assert (answer, skipped) == (ask(plain, TEXT[:100])[0], 64)
    following = [*TEXT[:100], *answer, *other[:20]]
    assert ask(cached, following) == (ask(plain, following)[0], 96)


def test_states_outlive_the_process(tmp_path: Path) -> None:
    counts = []
    for prompt in (TEXT[:70], TEXT[:120]):
        store = PrefixStore(tmp_path, 2**30)
        answer, count = ask(prefix_runner(store=store), prompt)
        store.close()
        assert answer == ask(prefix_runner(prefix_cache=False), prompt)[0]
        counts.append(count)
    assert counts == [0, 64]
    for damaged in tmp_path.glob("*.states"):
        os.truncate(damaged, 40)
    assert ask(prefix_runner(store=PrefixStore(tmp_path, 2**30)), TEXT[:70]) == (
        ask(prefix_runner(prefix_cache=False), TEXT[:70])[0],
        0,
    )


def test_states_of_pages_have_the_room_of_further_sequences() -> None:
    engine = prefix_runner(sequences=3)
    cache = engine.runners[0].cache
    prompts = [[number, *TEXT[:39]] for number in range(4)]
    for prompt in prompts:
        ask(engine, prompt)
    assert len(cache.states_by_name) == 2
    assert [ask(engine, prompts[number])[1] for number in (2, 1, 2, 3)] == [32, 0, 32, 0]
    size = sum(
        getattr(state, name).untyped_storage().nbytes()
        for states in cache.states_by_name.values()
        for state in states.values()
        for name in ("state", "inputs", "keys", "values", "decay")
    )
    assert size <= 2 * state_bytes(TARGET.config, torch.float32)
    tables = [cache.reserve(16) for _ in range(3)]
    assert all(tables) and not cache.states_by_name and cache.reserve(16) is None
    assert not cache.has_state_room


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_projections_are_packed_and_quantized(quantize: str | None, tmp_path: Path) -> None:
    sizes = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16)
    model = hybrid_model(seed=1, intermediate_size=64, **sizes)  # multiples of a block's 32
    save_model(model, tmp_path, dtype=torch.float32)
    llm = LLM(tmp_path, quantize=quantize, cache_gib=0.01)
    prompts = [TEXT[:30], TEXT[3:9], TEXT[5:60]]
    together = [output.ids for output in llm.generate(prompts, max_tokens=12, ignore_eos=True)]
    singly = [llm.generate(each, max_tokens=12, ignore_eos=True)[0].ids for each in prompts]
    assert together == singly
    mixer, attention = (llm.model.blocks[layer].attention for layer in (0, 1))
    assert type(mixer.qkvz) is type(mixer.merge) is type(attention.qkv)
    assert type(mixer.gates) not in (type(mixer.qkvz), nn.Linear)
    assert mixer.gates(torch.ones(1, 32)).dtype == torch.float32
