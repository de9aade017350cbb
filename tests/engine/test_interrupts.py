"""Exceptions that leave a step anywhere: other requests are unaffected, and no page leaks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

import outpace
from helpers import is_idle
from outpace.decoding import Decoding, Forward
from outpace.decoding import Request as Tokens
from outpace.engine.cache import PAGE_SIZE
from outpace.engine.engine import Engine
from outpace.engine.job import DecodingError, Job
from outpace.methods import Method
from workload import BATCH, Request, alone, new_engine, result

PACKAGE = str(Path(outpace.__file__).parent)
WATCHED = ("engine", "decoding", "methods", "attention")
"""Packages whose every function is interrupted."""


def small_engine() -> Engine:
    """Return an engine that splits prefills and makes requests wait for memory."""
    return new_engine(slots=12 * PAGE_SIZE, max_rows=9)


class Interrupt(KeyboardInterrupt):
    """An interrupt raised by a test."""


class Trace:
    """Raises in the n-th line that runs in the functions of the watched packages."""

    def __init__(self, at: int, error: type[BaseException] = Interrupt) -> None:
        self.at = at
        self.error = error
        self.lines = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Trace | None:
        if event == "call":
            path = frame.f_code.co_filename
            inside = path.startswith(PACKAGE) and path.split(os.sep)[-2] in WATCHED
            return self if inside else None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise self.error
        return self

    @contextmanager
    def on(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def serve(engine: Engine, requests: list[Request], trace: Trace | None = None) -> list[Job]:
    """Run all requests; the first exception that leaves a step is ignored."""
    jobs: dict[int, Job] = {}
    for turn in range(5000):
        for index, request in enumerate(requests):
            if request.arrives == turn:
                jobs[index] = request.submit(engine)
        try:
            if trace is None or trace.where:
                more = engine.step()
            else:
                with trace.on():
                    more = engine.step()
        except (Interrupt, SystemExit):
            more = True
        if not more and len(jobs) == len(requests):
            return [jobs[index] for index in range(len(requests))]
    raise AssertionError("a request never ends")


def harmed(engine: Engine, jobs: list[Job], requests: list[Request]) -> int:
    """Return the number of failed requests, after checking the others and the memory."""
    assert is_idle(engine)
    assert all(job.has_ended for job in jobs)
    errors = 0
    for job, request in zip(jobs, requests, strict=True):
        if job.error is not None:
            assert isinstance(job.error, DecodingError)
            errors += 1
        else:
            assert result(job)[:2] == alone(request)[:2], request
    again = serve(engine, requests[:3])
    assert [result(job) for job in again] == [alone(request) for request in requests[:3]]
    return errors


@pytest.fixture(scope="module")
def total() -> int:
    """Return the lines that the whole batch runs."""
    trace = Trace(at=0)
    jobs = serve(small_engine(), BATCH, trace)
    assert [result(job) for job in jobs] == [alone(request) for request in BATCH]
    return trace.lines


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(6))
def test_interrupts_at_many_lines_harm_one_request_at_most(total: int, part: int) -> None:
    step = total // 300
    for at in list(range(1 + part * step // 6, total, step))[part::6]:
        engine, trace = small_engine(), Trace(at)
        jobs = serve(engine, BATCH, trace)
        assert trace.where, at
        try:
            assert harmed(engine, jobs, BATCH) <= 1
        except AssertionError as error:
            raise AssertionError(f"interrupted in {trace.where}: {error}") from error


@pytest.mark.nightly
def test_interrupts_one_after_the_other(total: int) -> None:
    rng = Random(1)
    for _ in range(8):
        engine = small_engine()
        jobs = [request.submit(engine) for request in BATCH]
        for _ in range(20_000):
            trace = Trace(at=rng.randint(1, 5000))  # a step has up to 4000
            try:
                with trace.on():
                    more = engine.step()
            except Interrupt:
                more = True
            if not more:
                break
        assert all(job.has_ended for job in jobs)
        harmed(engine, jobs, BATCH)


@dataclass(frozen=True, kw_only=True)
class Raising(Method):
    """Raises an exception that is not an `Exception` in its method, early or late."""

    after: int
    error: type[BaseException] = SystemExit

    def decode(self, request: Tokens) -> Decoding:
        for count in range(self.after + 1):
            if count == self.after:
                raise self.error
            start = 0 if count == 0 else len(request) - 1
            out = yield Forward(ids=request.ids[start:], start=start)
            request.commit(out.tokens)


@pytest.mark.nightly
@pytest.mark.parametrize("error", [SystemExit, Interrupt])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_base_exception_in_a_method_ends_its_request_alone(
    after: int, error: type[BaseException]
) -> None:
    engine = small_engine()
    batch = [*BATCH[:5], Request(method=Raising(after=after, error=error)), *BATCH[5:]]
    jobs = serve(engine, batch)
    assert isinstance(jobs[5].error, DecodingError)
    del jobs[5], batch[5]
    assert harmed(engine, jobs, batch) == 0


@pytest.mark.sampled
@pytest.mark.parametrize("error", [RuntimeError, Interrupt, SystemExit])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_exception_in_a_listener_harms_its_own_request_at_most(
    error: type[BaseException], at: int
) -> None:
    engine, heard = small_engine(), [0]

    def listener(request: Tokens) -> None:
        heard[0] += 1
        if heard[0] == at:
            raise error("a listener fails")

    jobs = [
        request.submit(engine, listener if index == 3 else None)
        for index, request in enumerate(BATCH)
    ]
    for _ in range(5000):
        try:
            if not engine.step():
                break
        except (Interrupt, SystemExit):
            continue
    assert heard[0] >= at
    assert harmed(engine, jobs, BATCH) == (error is RuntimeError)
    assert error is not RuntimeError or "a listener fails" in str(jobs[3].error)


@pytest.mark.nightly
def test_cancelling_before_recovery_frees_memory(total: int) -> None:
    for at in Random(2).sample(range(1, total + 1), 15):
        engine, trace = small_engine(), Trace(at)
        jobs = [request.submit(engine) for request in BATCH]
        try:
            while True:
                with trace.on():
                    if not engine.step():
                        break
        except Interrupt:
            pass
        for job in jobs[::2]:
            engine.cancel(job)
        while engine.step():
            pass
        harmed(engine, jobs[1::2], BATCH[1::2])
        assert all(job.has_ended for job in jobs)


@pytest.mark.parametrize("steps", [0, 5], ids=["waiting", "running"])
def test_interrupted_cancellation_harms_no_other(steps: int) -> None:
    at, trace = 0, Trace(1)
    while trace.where or not at:
        engine, at = new_engine(), at + 1
        jobs = [request.submit(engine) for request in BATCH[:3]]
        for _ in range(steps):
            engine.step()
        trace = Trace(at)
        try:
            with trace.on():
                engine.cancel(jobs[1])
        except Interrupt:
            engine.cancel(jobs[1])
        for _ in range(1000):
            if not engine.step():
                break
        assert is_idle(engine)
        assert [result(job) for job in jobs[::2]] == [alone(request) for request in BATCH[:3:2]]
        assert jobs[1].has_ended, trace.where
    assert at > 5
