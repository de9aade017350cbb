"""Tests of prefetching: the next step's data is computed during a step."""

import threading
from pathlib import Path

import pytest

from outpace.training.trainer import Prefetcher
from runs import trainer


def test_the_next_one_is_begun() -> None:
    made: list[int] = []
    begun = {n: threading.Event() for n in range(12)}

    def make(step: int) -> int:
        assert threading.current_thread() is not threading.main_thread()
        made.append(step)
        begun[step].set()
        return step * 10

    ahead = Prefetcher(make)
    assert ahead(0) == 0 and begun[1].wait(5)
    assert ahead(1) == 10 and begun[2].wait(5)
    assert ahead(7, last=True) == 70
    ahead.close()
    assert made == [0, 1, 2, 7]


def test_a_fault_is_raised_where_it_is_wanted() -> None:

    def make(step: int) -> int:
        if step == 1:
            raise ValueError("step 1 has no data")
        return step

    ahead = Prefetcher(make)
    assert ahead(0) == 0
    with pytest.raises(ValueError, match="step 1"):
        ahead(1)
    ahead.close()


def test_batches_are_those_of_the_step(tmp_path: Path) -> None:
    run = trainer(tmp_path, batch=4)
    for step in (0, 1, 5, 6):
        ours, tokens = run.prefetcher(step)
        theirs, count = run.build_batches(step)
        assert tokens == count
        assert all((a.ids == b.ids).all() for a, b in zip(ours, theirs, strict=True))
    run.close()
