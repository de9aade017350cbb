"""Models whose gated delta layers run in the compiled loop give the text of PyTorch's form."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers import (
    VOCAB,
    engine_of,
    enter,
    feature_draft,
    finish,
    hybrid_model,
    run,
    runner,
    tokens,
    whole,
)
from outpace.decoding import Forward, Sampling
from outpace.engine import cpu
from outpace.engine.cpu import pack_model
from outpace.engine.engine import Engine
from outpace.engine.job import Job
from outpace.engine.runner import Runner
from outpace.kernels.gated_delta import find_delta_loop
from outpace.methods import Autoregressive, DFlash, Lookup, Method, Speculative

pytestmark = pytest.mark.skipif(find_delta_loop() is None, reason="there is no compiled loop")

SIZES = {"linear_key_head_dim": 16, "linear_value_head_dim": 32}
TARGET, DRAFT = hybrid_model(seed=1, **SIZES), hybrid_model(seed=4, **SIZES)
MODELS = {"target": TARGET, "draft": DRAFT, "features": feature_draft(TARGET, seed=3)}
TEXT = [(7 * slot * slot + 3 * slot + slot // 5) % (VOCAB - 1) for slot in range(140)]
METHODS: list[Method] = [
    Autoregressive(),
    Lookup(tokens=12),
    Speculative(draft="draft", tokens=5),
    Speculative(draft="target", tokens=14),
    DFlash(draft="features", tokens=3),
]
REQUESTS = [(method, number) for number, method in enumerate(METHODS * 2)]
PLAIN = hybrid_model(seed=1, **SIZES)
for model in (TARGET, DRAFT):
    pack_model(model)


def submit(engine: Engine, method: Method, number: int) -> Job:
    """Queue a request, whose prompt depends on its number."""
    begin, length = 5 * number % 40, (1, 3, 17, 70, 9)[number % 5]
    roles = {"target": "target", **method.model_names()}
    runners = {role: runner(engine, name) for role, name in roles.items()}
    given: dict[str, Any] = {"max_tokens": 14, "eos": frozenset[int](), "sampling": Sampling()}
    return enter(engine, method, TEXT[begin : begin + length], runners=runners, **given)


def alone(number: int) -> list[int]:
    """Return the text of plain decoding with PyTorch's form."""
    engine = engine_of(("target", PLAIN))
    job = submit(engine, Autoregressive(), number)
    finish(engine)
    return tokens(job)


def test_requests_together_have_the_text_of_each_alone() -> None:
    engine = engine_of(*MODELS.items(), max_rows=40)
    jobs = [submit(engine, method, number) for method, number in REQUESTS]
    finish(engine)
    for job, (method, number) in zip(jobs, REQUESTS, strict=True):
        assert tokens(job) == alone(number), method
    again = [submit(engine, method, number) for method, number in REQUESTS]
    finish(engine)  # from states of the prefix cache
    assert list(map(tokens, again)) == list(map(tokens, jobs))


@pytest.mark.parametrize("call", [1, 2, 3, 8, 25])
def test_a_pass_that_fails_in_the_middle_runs_again(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = cpu.run_recurrent, 0

    def fail_once(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        found = plain(*given)
        if calls == call:
            raise KeyboardInterrupt("once")
        return found

    monkeypatch.setattr(cpu, "run_recurrent", fail_once)
    engine = engine_of(*MODELS.items(), max_rows=40)
    jobs = [submit(engine, METHODS[number % 4], number) for number in (3, 6, 8)]
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    finish(engine)
    assert [tokens(job) for job in jobs] == [alone(number) for number in (3, 6, 8)]


def test_rows_of_a_batch_have_the_logits_of_the_whole_text() -> None:
    texts = [TEXT[number : number + 30 + number] for number in range(5)]
    for text, found in zip(texts, logits_of(texts), strict=True):
        torch.testing.assert_close(found, whole(PLAIN, text, causal=True), atol=2e-4, rtol=2e-4)


def logits_of(texts: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits of all rows of texts in one engine: a prompt, two rows, and one."""
    each = Runner("tiny", TARGET, slots=1024)
    tables = [each.reserve(100) for _ in texts]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    for back in ((None, -3), (-3, -1), (-1, None)):
        forwards = []
        for text in texts:
            begin, end, _ = slice(*back).indices(len(text))
            forward = Forward(ids=text[begin:end], start=begin, predict=range(begin + 1, end + 1))
            forward.read = replace(forward.read, keep=True)
            forwards.append(forward)
        for own, found in zip(rows, run(each, forwards, tables), strict=True):
            assert found.logits is not None
            own.append(found.logits)
    return [torch.cat(own) for own in rows]
