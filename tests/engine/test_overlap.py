"""Halves of the requests in turns: equal tokens, who ends, and when they pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import engine_of, finish, pages_in_use, runner, tokens
from outpace import LLM
from outpace.decoding import Sampling
from outpace.engine.engine import Engine
from outpace.engine.feed import Feed
from outpace.engine.job import Job
from outpace.engine.overlap import Overlap, Work, half
from outpace.engine.readout import Launched
from outpace.engine.runner import Runner
from outpace.methods import APD, Autoregressive, DFlash, Speculative
from workload import BATCH, KINDS, MODELS, Request, alone, halving, new_engine, result, serve

AR = Autoregressive()


def flights(engine: Engine) -> list[tuple[str, str]]:
    """A list that will hold what is launched and what lands, by the names of models."""
    found: list[tuple[str, str]] = []
    launch, land = engine.launch, engine.land

    def launched(each: Runner, work: Sequence[Work]) -> Any:
        found.append(("launch", each.name))
        return launch(each, work)

    def landed(flight: Any) -> None:
        if flight is not None:
            found.append(("land", flight.runner.name))
        land(flight)

    engine.launch, engine.land = launched, landed  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("limits", [{}, {"max_rows": 7}, {"slots": 320}], ids=str)
def test_tokens_are_those_of_a_request_alone(limits: dict[str, int]) -> None:
    """All methods together, traces as well; prefills cut, and a queue that waits for memory."""
    engine = halving(new_engine(**limits))
    assert serve(engine, BATCH) == [alone(request) for request in BATCH]
    assert not engine.step() and engine.overlap.flight is None and pages_in_use(engine) == 0


@pytest.mark.parametrize("method", KINDS, ids=lambda method: type(method).__name__)
def test_a_pass_is_launched_before_the_other_lands(method: Any) -> None:
    """Behind the first one, as long as both halves run."""
    engine = halving(new_engine())
    asked = [Request(method=method, sampling=Sampling(seed=n)) for n in range(4)]
    jobs = [each.submit(engine) for each in asked]
    found = flights(engine)
    for _ in range(6):
        engine.step()
    assert [what for what, _ in found][:6] == ["launch", *["launch", "land"] * 3][:6]
    finish(engine)
    assert [result(job) for job in jobs] == [alone(each) for each in asked]


def test_one_request_alone_lands_at_once() -> None:
    """There is no other half."""
    engine = halving(new_engine())
    Request(method=AR).submit(engine)
    found = flights(engine)
    finish(engine)
    assert all(a != b for (a, _), (b, _) in pairwise(found)) and len(found) > 8


def test_a_cpu_is_never_halved() -> None:
    """It works in the pass itself."""
    engine = new_engine()
    engine.overlap = Overlap(True)
    found = flights(engine)
    serve(engine, [Request(method=AR) for _ in range(4)])
    assert all(a != b for (a, _), (b, _) in pairwise(found))


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("overlap", "device", "processes", "message"),
    [
        (True, CPU, 1, "overlap is for a CUDA device, not for cpu"),
        (True, GPU, 2, "overlap is for a model in one process"),
        (1, CPU, 1, "overlap must be True or False, not 1"),
        ("auto", GPU, 1, "overlap must be True or False, not 'auto'"),
    ],
)
def test_what_cannot_overlap_is_refused(
    overlap: Any, device: torch.device, processes: int, message: str
) -> None:
    """Before a model loads."""
    with pytest.raises(ValueError, match=message):
        Overlap.of(overlap, device, processes)


def test_overlap_is_decided_where_it_is_wanted() -> None:
    """And never elsewhere."""
    assert Overlap.of(True, GPU, 1).forced is None
    assert Overlap.of(False, GPU, 1).forced is False
    assert LLM("tiny-ar").engine.overlap.forced is False
    with pytest.raises(ValueError, match="overlap is for a CUDA device"):
        LLM("tiny-ar", overlap=True, device="cpu")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_halves_have_about_as_many_rows(sizes: list[int]) -> None:
    """As near as whole requests allow, and the first of several never has all."""
    table: Any = None
    work: list[Any] = [
        (index, Feed(ids=[1] * size, start=0, table=table, rows=[], slots=[]), None)
        for index, size in enumerate(sizes)
    ]
    found = half(work)
    assert found == work[: len(found)] and len(found) >= 1
    if len(sizes) > 1:
        first, total = sum(sizes[: len(found)]), sum(sizes)
        best = min(abs(sum(sizes[:n]) - total / 2) for n in range(1, len(sizes)))
        assert len(found) < len(sizes)
        assert abs(first - total / 2) == best


# What goes wrong while a pass is in flight.


def begun(method: Any = AR, count: int = 4) -> tuple[Engine, list[Request], list[Job]]:
    """So many requests, of which the first half is in flight."""
    engine = halving(new_engine())
    asked = [Request(method=method, prompt=(3, 1, 4, n + 1)) for n in range(count)]
    jobs = [each.submit(engine) for each in asked]
    engine.step()
    assert engine.overlap.flight is not None
    assert [job for job, _, _ in engine.overlap.flight.work] == jobs[: count // 2]
    return engine, asked, jobs


@pytest.mark.parametrize(
    "method", [AR, APD(verifier="causal"), DFlash(draft="features", tokens=4)], ids=repr
)
def test_who_is_cancelled_in_flight_ends_there(method: Any) -> None:
    """The others are as alone; nobody finds what it wrote under another's name."""
    engine, asked, jobs = begun(method)
    engine.cancel(jobs[0])
    late = [Request(method=method, prompt=(3, 1, 4, n)) for n in (1, 9)]
    more = [each.submit(engine) for each in late]
    finish(engine)
    assert jobs[0].request.finish_reason == "cancelled" and not tokens(jobs[0])
    assert [result(job) for job in jobs[1:]] == [alone(each) for each in asked[1:]]
    assert [result(job) for job in more] == [alone(each) for each in late]
    assert pages_in_use(engine) == 0


def test_a_flight_that_nobody_waits_for_is_forgotten() -> None:
    """And what it holds with it."""
    engine, _, jobs = begun()
    for job in jobs:
        engine.cancel(job)
    assert engine.overlap.flight is None and not engine.step()


def fail(error: BaseException) -> Callable[..., Any]:
    """A function that raises it."""

    def failing(*given: Any) -> Any:
        raise error

    return failing


def test_a_pass_that_fails_in_flight_is_run_request_by_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And those in the other half notice nothing."""
    engine, asked, jobs = begun(APD(verifier="causal"))
    with monkeypatch.context() as patch:
        land, count = Launched.land, [0]

        def spoiled(launched: Launched) -> Any:
            count[0] += 1
            if count[0] in (1, 2):  # in flight, and the first of it alone
                raise ArithmeticError("the model's logits are not finite numbers")
            return land(launched)

        patch.setattr(Launched, "land", spoiled)
        engine.step()
    finish(engine)
    assert [job.error is None for job in jobs] == [False, True, True, True]
    assert [result(job) for job in jobs[1:]] == [alone(each) for each in asked[1:]]
    assert pages_in_use(engine) == 0


def test_memory_that_is_short_ends_the_newest_of_its_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """The half in flight lands."""
    engine, asked, jobs = begun()
    target = runner(engine, "causal")
    with monkeypatch.context() as patch:
        patch.setattr(target, "launch", fail(torch.OutOfMemoryError("CUDA out of memory")))
        engine.step()
    finish(engine)
    assert [job.error is None for job in jobs] == [True, True, True, False]
    assert [result(job) for job in jobs[:3]] == [alone(each) for each in asked[:3]]
    assert engine.max_sequences == 3 and pages_in_use(engine) == 0


def test_a_device_that_is_lost_in_flight_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the half whose pass was just launched; nothing hangs."""
    engine, _, jobs = begun(Speculative(draft="near"))
    lost = fail(torch.AcceleratorError("CUDA error: device is lost"))
    monkeypatch.setattr(Launched, "land", lost)
    for each in engine.runners:
        monkeypatch.setattr(each.cache, "erase", lost)
    finish(engine)
    assert all("device is lost" in str(job.error) and job.over for job in jobs)
    assert engine.overlap.flight is None and pages_in_use(engine) == 0


def test_an_interrupt_launches_again_what_was_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the launch of the other half, and in the landing itself."""
    for name in ("launch", "land"):
        engine, asked, jobs = begun()
        with monkeypatch.context() as patch:
            patch.setattr(engine, name, fail(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        finish(engine)
        assert [result(job) for job in jobs] == [alone(each) for each in asked]
        assert pages_in_use(engine) == 0


def test_the_table_of_a_pass_in_flight_is_not_fed_again() -> None:
    """Its requests do not wait, and are no part of the next pass."""
    engine, _, jobs = begun()
    assert engine.overlap.waiting(engine.running) == jobs[2:]


# When it pays.


class Machine:
    """A device that takes `fixed` and `row` for each row, and a host that takes `host` for each
    request that it decides; both in the clock of an engine."""

    def __init__(self, *, fixed: float, row: float, host: float, overlap: Overlap) -> None:
        self.now = self.free = 0.0
        self.fixed, self.row, self.host = fixed, row, host
        self.halved = 0
        self.engine = halving(engine_of(("causal", MODELS["causal"]), slots=8192), overlap)
        self.engine.clock = lambda: self.now
        self.target = runner(self.engine, "causal")
        launch, resume = self.target.launch, self.engine.resume

        def launched(feeds: Sequence[Feed]) -> Any:
            found = launch(feeds)
            rows = sum(feed.size for feed in feeds)
            self.free = max(self.now, self.free) + self.fixed + self.row * rows
            return Landing(self, found, self.free)

        def resumed(*given: Any) -> None:
            self.now += self.host
            resume(*given)

        self.target.launch = launched  # type: ignore[method-assign]
        self.engine.resume = resumed  # type: ignore[method-assign]

    def run(self, count: int = 8, length: int = 100) -> float:
        """Share of the steps of so many requests that were halves."""
        asked = [Request(method=AR, prompt=(n % 20 + 1,), max_tokens=length) for n in range(count)]
        jobs = [replace(each).submit(self.engine) for each in asked]
        for job in jobs:
            job.request.eos = frozenset()
        steps = halves = 0
        while self.engine.step():
            steps, halves = steps + 1, halves + self.engine.overlap.halves
        assert all(len(tokens(job)) == length for job in jobs)
        return halves / steps


class Landing:
    """A pass that is there at a time."""

    def __init__(self, machine: Machine, launched: Launched, arrives: float) -> None:
        self.machine, self.launched, self.arrives = machine, launched, arrives

    def land(self) -> Any:
        """Wait for it."""
        self.machine.now = max(self.machine.now, self.arrives)
        return self.launched.land()


def both(**costs: float) -> tuple[float, float, float]:
    """Seconds all at once and in halves, over those of what decides for itself; its halves."""
    own = Machine(**costs, overlap=Overlap())
    share = own.run()
    whole, halves = (Machine(**costs, overlap=each) for each in (Overlap(False), Overlap(True)))
    for machine in (whole, halves):
        machine.run()
    return whole.now / own.now, halves.now / own.now, share


def test_halves_pay_where_rows_cost_and_the_host_takes_long() -> None:
    """A pass of 8 rows takes 8.1, and deciding 2.4: that can be hidden."""
    whole, halves, share = both(fixed=0.1, row=1.0, host=0.3)
    assert whole > 1.2 and halves > 0.97 and share > 0.9


def test_halves_do_not_pay_where_a_pass_takes_as_long_with_half_the_rows() -> None:
    """Tried, and left."""
    whole, halves, share = both(fixed=10.0, row=0.01, host=0.3)
    assert whole > 0.97 and halves > 1.5 and share < 0.1


def test_halves_are_not_even_tried_where_nothing_can_be_won() -> None:
    """The host takes one part in a hundred."""
    whole, _, share = both(fixed=0.1, row=1.0, host=0.01)
    assert whole == 1.0 and share == 0.0


def test_another_load_is_decided_anew() -> None:
    """First bound by its weights, then by its rows."""
    machine = Machine(fixed=10.0, row=0.0, host=0.5, overlap=Overlap())
    assert machine.run(length=120) < 0.2
    machine.fixed, machine.row = 0.1, 1.0
    assert machine.run(count=64, length=60) > 0.5


def test_time_without_requests_does_not_count() -> None:
    """As between two answers."""
    machine = Machine(fixed=0.1, row=1.0, host=0.3, overlap=Overlap())
    machine.run(length=30)
    before = machine.engine.overlap.costs[True].at(8)
    machine.now += 1000
    machine.run(length=30)
    assert machine.engine.overlap.costs[True].at(8) == pytest.approx(before, rel=0.2)


def test_what_is_remembered_of_the_other_way_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where halves once paid and no longer do, they are left in the end."""
    monkeypatch.setattr("outpace.engine.overlap.SELDOM", 64)
    machine = Machine(fixed=0.1, row=1.0, host=0.3, overlap=Overlap())
    assert machine.run(length=120) > 0.6
    machine.fixed, machine.row = 10.0, 0.0
    assert machine.run(length=140) < 0.5
