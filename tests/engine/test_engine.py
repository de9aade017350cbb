"""Admission, scheduling, cancellation and errors of the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch

from helpers import (
    MASK,
    causal_model,
    engine_of,
    enter,
    finish,
    is_idle,
    pages_in_use,
    runner,
    tokens,
)
from outpace.decoding import CAUSAL, FULL, Decoding, Forward, Sampling
from outpace.decoding import Request as Tokens
from outpace.engine import readout
from outpace.engine.cache import PAGE_SIZE
from outpace.engine.engine import Engine
from outpace.engine.job import DecodingError, Job
from outpace.engine.stats import Stats
from outpace.methods import APD, D2F, Autoregressive, LeftToRight, Method
from refusal import refuses
from workload import KINDS, LONG, MODELS, Request, alone, new_engine, result, serve

AR = Autoregressive()
LTR = LeftToRight(window=4)
VERIFIED = APD(verifier="causal", ratio=0.6, lookahead=6)


@dataclass(frozen=True, kw_only=True)
class Scripted(Method):
    """Yields given forwards, after `good` tokens of plain decoding."""

    forwards: tuple[Forward, ...] = field(default=(), hash=False)
    good: int = 0
    error: str = ""

    def decode(self, seq: Tokens) -> Decoding:
        out = None
        for _ in range(self.good):
            start = 0 if out is None else len(seq) - 1
            out = yield Forward(ids=seq.ids[start:], start=start)
            seq.commit(out.tokens)
        for forward in self.forwards:
            out = yield forward
        if self.error:
            raise RuntimeError(self.error)


# Tokens and traces.


def test_trace_has_every_forward() -> None:
    _, _, steps = alone(Request(method=AR, prompt=(3, 1, 4, 1), max_tokens=3))
    seen = [(step.start, step.rows, step.visible) for step in steps]
    assert seen == [(0, 4, 4), (4, 1, 5), (5, 1, 6)]


def test_trace_has_masks_and_holes_of_every_forward() -> None:
    request = Request(method=D2F(block=2, confidence=0.0), prompt=(3, MASK, 4), max_tokens=3)
    seen = [(step.pattern, step.holes) for step in alone(request)[2]]
    assert seen == [((3, 2), (range(3, 5),)), ((2, 1), (range(5, 6),))]
    _, _, steps = alone(Request(method=AR, max_tokens=3))
    assert all(step.pattern == CAUSAL and step.holes == () for step in steps)


def test_listener_is_called_for_tokens_and_the_end() -> None:
    heard = []
    engine = new_engine()
    job = Request(method=VERIFIED, max_tokens=20).submit(
        engine, lambda seq: heard.append((len(seq.tokens), seq.finish_reason))
    )
    finish(engine)
    kept = [step.committed for step in job.trace if step.committed]
    assert [count for count, _ in heard] == [sum(kept[: i + 1]) for i in range(len(kept))]
    assert [reason for _, reason in heard] == [None] * (len(kept) - 1) + ["length"]


@pytest.mark.parametrize("aside", [False, True])
def test_listeners_are_called_while_a_device_works(
    aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    engine = new_engine()
    assert not engine.is_async
    engine.is_async = aside

    wait = readout.HostTransfer.wait

    def waited(sent: readout.HostTransfer) -> Any:
        told.append("result")
        return wait(sent)

    monkeypatch.setattr(readout.HostTransfer, "wait", waited)
    job = Request(method=AR, max_tokens=4).submit(engine, lambda seq: told.append("heard"))
    steps = []
    while engine.step():
        steps.append("".join(word[0] for word in told))
        told.clear()
    assert steps == (["r", "hr", "hr", "hrh"] if aside else ["rh", "rh", "rh", "rh"])
    assert result(job) == alone(Request(method=AR, max_tokens=4)) and not engine.pending_callbacks


def test_one_pass_serves_all_waiting_jobs() -> None:
    engine = new_engine()
    target = runner(engine, "causal")
    sizes: list[int] = []
    launch = target.launch_pass
    target.launch_pass = lambda forwards: (sizes.append(len(forwards)), launch(forwards))[1]
    serve(engine, [Request(method=AR, prompt=(i + 1,), max_tokens=1) for i in range(10)])
    assert sizes == [10]


def test_drafts_run_before_the_target() -> None:
    engine = new_engine()
    order: list[tuple[str, int]] = []
    for each in engine.runners:

        def noted(forwards, launch=each.launch_pass, name=each.name):
            order.append((name, len(forwards)))
            return launch(forwards)

        each.launch_pass = noted
    method = APD(verifier="causal", ratio=1.0, lookahead=2)
    serve(engine, [Request(method=method, max_tokens=6, arrives=turn) for turn in (0, 1)])
    assert order[:4] == [("diffusion", 1), ("causal", 1), ("diffusion", 2), ("causal", 2)]


def test_long_prefill_does_not_block_others() -> None:
    engine = new_engine(max_rows=5)
    long = Request(method=AR, prompt=(1,) * 60, max_tokens=1).submit(engine)
    short = Request(method=AR, prompt=(2,), max_tokens=4).submit(engine)
    while not short.has_ended:
        engine.step()
    assert not long.has_ended and tokens(short)
    finish(engine)
    assert tokens(long)


# Admission.


def test_requests_wait_for_memory_in_order() -> None:
    engine = new_engine(slots=3 * PAGE_SIZE)
    batch = [Request(method=AR, prompt=(i + 1,) * 20, max_tokens=12) for i in range(3)]
    ended: list[int] = []
    jobs = [
        request.submit(engine, lambda seq, i=i: ended.append(i) if seq.finish_reason else None)
        for i, request in enumerate(batch)
    ]
    engine.step()
    assert Stats.from_engine(engine).running == 1 and Stats.from_engine(engine).waiting == 2
    finish(engine)
    assert [result(job) for job in jobs] == [alone(request) for request in batch]
    assert ended == [0, 1, 2]
    assert pages_in_use(engine) == 0


def test_memory_is_reserved_in_all_models_or_in_none() -> None:
    engine = new_engine(slots=3 * PAGE_SIZE)
    verifier = runner(engine, "causal")
    held = verifier.reserve(3 * PAGE_SIZE)
    assert held is not None
    job = Request(method=VERIFIED).submit(engine)
    assert not engine.step()
    assert not runner(engine, "diffusion").cache_usage.held_pages
    verifier.release(held)
    finish(engine)
    assert tokens(job)


@pytest.mark.parametrize(
    ("methods", "count"),
    [
        ([KINDS[n] for n in (0, 3, 4, 21, 28)], 12),  # on one target, and one of them reserves all
        pytest.param([KINDS[n] for n in (5, 7, 14, 0)], 16, marks=pytest.mark.nightly),
        pytest.param(KINDS, 2000, marks=pytest.mark.nightly),
    ],
)
def test_requests_that_lose_their_memory_begin_again(methods: list[Method], count: int) -> None:
    engine, rng = new_engine(slots=7 * PAGE_SIZE, max_rows=40), Random(1)
    kinds = [
        Request(
            method=method,
            prompt=LONG[rng.randint(0, 3) : rng.randint(16, 30)],
            max_tokens=rng.randint(20, 40),
            sampling=Sampling(temperature=rng.choice([0.0, 1.0]), seed=rng.randint(0, 2)),
        )
        for method in methods
        for _ in range(2)
    ]
    asked = [rng.choice(kinds) for _ in range(count)]
    lengths: list[list[int]] = [[] for _ in asked]
    jobs: list[Job] = []
    for request, sent in zip(asked, lengths, strict=True):
        jobs.append(request.submit(engine, lambda seq, sent=sent: sent.append(len(seq.tokens))))
        if len(jobs) % 100 == 0:
            finish(engine)
    finish(engine)
    assert [result(job)[:2] for job in jobs] == [alone(request)[:2] for request in asked]
    assert all(sent == sorted(sent) for sent in lengths)  # no text is sent twice
    begun = [
        sum(step.start == 0 and step.model == "target" for step in job.trace)
        for job in jobs
        if job.method.is_resumable
    ]
    assert max(begun) > 1
    assert is_idle(engine)
    for each in engine.runners:
        assert not each.cache.promised and len(each.cache.free) == each.cache.num_pages


# Cancellation.


def test_cancelling_a_queued_request_removes_it() -> None:
    engine = new_engine(max_sequences=1)
    first, second = (Request(method=AR).submit(engine) for _ in range(2))
    engine.step()
    engine.cancel(second)
    assert second.finish_reason == "cancelled"
    assert not Stats.from_engine(engine).waiting
    finish(engine)
    assert result(first) == alone(Request(method=AR)) and second.trace == []


@pytest.mark.parametrize("method", [AR, LTR, VERIFIED], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("turns", [1, 2, 5])
def test_cancelling_a_running_request_frees_its_pages_at_once(method: Method, turns: int) -> None:
    engine = new_engine()
    heard: list[str | None] = []
    request = Request(method=method, max_tokens=30)
    job = request.submit(engine, lambda seq: heard.append(seq.finish_reason))
    for _ in range(turns):
        engine.step()
    engine.cancel(job)
    assert pages_in_use(engine) == 0
    assert (job.finish_reason, heard[-1]) == ("cancelled", "cancelled")
    other = Request(method=AR)
    assert serve(engine, [other]) == [alone(other)]


def test_cancelling_a_split_prefill_drops_the_rest() -> None:
    engine = new_engine(max_rows=5)
    job = Request(method=AR, prompt=(1,) * 30).submit(engine)
    engine.step()
    engine.cancel(job)
    assert pages_in_use(engine) == 0 and not engine.step()


def test_cancelling_from_the_listener_keeps_tokens() -> None:
    engine = new_engine()

    def stop(seq: Tokens) -> None:
        if len(seq.tokens) >= 4:
            engine.cancel(job)

    job = Request(method=AR).submit(engine, stop)
    finish(engine)
    assert (len(job.tokens), job.finish_reason) == (4, "cancelled")
    assert pages_in_use(engine) == 0


def test_one_listener_may_cancel_another_request() -> None:
    engine = new_engine()
    jobs: list[Job] = []

    def stop(seq: Tokens) -> None:
        engine.cancel(jobs[1])

    jobs.append(Request(method=AR).submit(engine, stop))
    jobs.append(Request(method=AR).submit(engine))
    finish(engine)
    assert result(jobs[0]) == alone(Request(method=AR))
    assert jobs[1].finish_reason == "cancelled"
    assert is_idle(engine)


# Errors.


def fails_alone(method: Method) -> DecodingError:
    """Return the error of a request, after checking that others succeed and pages are freed."""
    engine = new_engine()
    neighbour = Request(method=AR)
    jobs = [request.submit(engine) for request in (neighbour, Request(method=method), neighbour)]
    finish(engine)
    assert result(jobs[0]) == result(jobs[2]) == alone(neighbour)
    assert isinstance(jobs[1].error, DecodingError)
    assert jobs[1].finish_reason is None and jobs[1].has_ended
    assert is_idle(engine)
    return jobs[1].error


@pytest.mark.parametrize("good", [0, 1, 3])
def test_error_in_a_method_fails_its_request_alone(good: int) -> None:
    error = fails_alone(Scripted(good=good, error="this went wrong"))
    assert "Scripted(" in str(error) and f"at slot {5 + good}" in str(error)
    assert "this went wrong" in str(error)
    assert isinstance(error.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("forward", "match"),
    [
        (Forward(ids=[1, 2], start=9), "9"),
        (Forward(ids=[1], start=5, pattern=FULL, visible_end=40), "40"),
        (Forward(ids=[99], start=5), "99"),
        (Forward(ids=[1] * 99, start=0), "98"),
        (Forward(ids=[1], start=5, predict=[3]), "3"),
        (Forward(ids=[1], start=5, positions=[5, 6]), "positions"),
        (Forward(ids=[1], start=5, positions=[10_000]), "10000"),
        (Forward(ids=[1, 2, 3], start=5, pattern=(-1, 4)), r"\(-1, 4\)"),
        (Forward(ids=[1], start=5, model="nobody"), "nobody"),
    ],
)
def test_forward_that_cannot_run_fails_its_request_alone(forward: Forward, match: str) -> None:
    error = fails_alone(Scripted(good=1, forwards=(forward,)))
    with pytest.raises(ValueError, match=match):
        raise error.__cause__ or error


def test_error_in_a_pass_fails_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    jobs = [Request(method=AR).submit(engine) for _ in range(2)]

    def broken(*given: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(jobs[0].pairing.runners["target"], "launch_pass", broken)
        finish(engine)
    assert all("out of memory" in str(job.error) for job in jobs)
    assert is_idle(engine)
    job = Request(method=AR).submit(engine)
    finish(engine)
    assert result(job) == alone(Request(method=AR))


def test_out_of_memory_ends_the_newest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = new_engine()
    asked = [Request(method=AR, prompt=(3, n)) for n in range(1, 6)]
    jobs = [each.submit(engine) for each in asked]
    runner = jobs[0].pairing.runners["target"]
    launch = runner.launch_pass

    def small(feeds: Sequence[Any]) -> Any:
        if len(feeds) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(feeds)

    monkeypatch.setattr(runner, "launch_pass", small)
    finish(engine)
    assert [job.error is None for job in jobs] == [True, True, True, False, False]
    assert "CUDA out of memory" in str(jobs[4].error) and engine.max_sequences == 3
    assert [result(job) for job in jobs[:3]] == [alone(each) for each in asked[:3]]
    assert caplog.text.count("out of memory") == 2 and pages_in_use(engine) == 0
    more = [each.submit(engine) for each in asked]
    finish(engine)
    assert [result(job) for job in more] == [alone(each) for each in asked]


def test_a_lost_device_ends_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(max_sequences=2)
    jobs = [Request(method=VERIFIED).submit(engine) for _ in range(4)]
    engine.step()

    def gone(*given: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: device is lost")

    for each in engine.runners:
        monkeypatch.setattr(each, "launch_pass", gone)
        monkeypatch.setattr(each.cache, "erase_pages", gone)
    finish(engine)
    assert all("device is lost" in str(job.error) and job.is_finished for job in jobs)
    assert is_idle(engine)
    late = Request(method=AR).submit(engine)
    finish(engine)
    assert "device is lost" in str(late.error)


# Requests that could never run.


def test_requests_that_could_never_run_are_refused() -> None:
    small = engine_of(("diffusion", MODELS["diffusion"]), ("causal", causal_model(vocab_size=10)))
    longest = Request(method=AR, prompt=(1,) * 100, max_tokens=60)
    for given, engine, param in (
        (Request(method=VERIFIED, prompt=(12,)), small, "prompt"),
        (replace(longest, max_tokens=61), new_engine(), "max_tokens"),
        (Request(method=AR, prompt=(1,) * 40), new_engine(slots=48), "max_tokens"),
        (Request(method=AR, prompt=(1,) * 50), new_engine(slots=48), "prompt"),
    ):
        with refuses(param):
            given.submit(engine)
        assert not Stats.from_engine(engine).waiting
    assert serve(new_engine(), [longest])[0][1] in ("length", "stop")


def test_methods_refuse_the_other_kind_of_model() -> None:
    engine = new_engine()
    for method, target in ((AR, "diffusion"), (LTR, "causal")):
        with refuses("method"):
            enter(engine, method, [1], runners={"target": runner(engine, target)}, max_tokens=1)


@pytest.mark.parametrize("limit", ["max_rows", "max_sequences"])
def test_engine_that_could_run_nothing_is_refused(limit: str) -> None:
    with refuses(limit):
        Engine(**{limit: 0})
