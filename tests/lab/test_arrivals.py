"""Tests of arrival processes."""

import asyncio
import statistics

import pytest

from outpace.lab.load import ClosedLoop, Poisson


def sent(arrivals, count, seconds=0.0):
    """Times at which requests were sent, and the maximum number in flight."""
    moments, now, most = [], 0, 0

    async def ask(body):
        nonlocal now, most
        moments.append(asyncio.get_running_loop().time())
        now += 1
        most = max(most, now)
        await asyncio.sleep(seconds)
        now -= 1

    asyncio.run(arrivals.send_all([{"n": n} for n in range(count)], ask))
    return moments, most


@pytest.mark.parametrize(("streams", "count", "most"), [(1, 5, 1), (4, 20, 4), (8, 3, 3)])
def test_a_closed_loop_has_as_many_under_way_as_streams(streams, count, most):
    moments, found = sent(ClosedLoop(concurrency=streams), count, 0.002)
    assert len(moments) == count and found == most


def test_an_open_loop_does_not_wait_for_answers():
    _, most = sent(Poisson(rate=1e6), 20, 0.1)
    assert most == 20


def test_arrivals_of_a_seed_are_the_same_and_as_often_as_said(monkeypatch):
    def gaps(seed):
        waits, clock = [], [0.0]

        async def sleep(seconds):
            waits.append(seconds)
            clock[0] += seconds

        class Loop:
            def time(self):
                return clock[0]

        async def ask(body):
            pass

        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", sleep)
            patch.setattr(asyncio, "get_running_loop", Loop)
            asyncio.run(Poisson(rate=4, seed=seed).send_all([{}] * 1500, ask))
        return waits

    first = gaps(1)
    assert first == gaps(1) != gaps(2)
    # The mean of 1500 exponential gaps has a standard error of 2.6 %.
    assert statistics.mean(first) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(first) == pytest.approx(0.25, rel=0.1)
