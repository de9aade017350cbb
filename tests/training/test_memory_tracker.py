"""Bytes of live tensors are counted, also where another thread frees them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread

import pytest
import torch

from outpace.training.memory_tracker import MemoryTracker


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads take turns as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_live_bytes_and_their_peak() -> None:
    with MemoryTracker() as memory:
        first = torch.zeros(2, 8)
        second = first + 1
        second.add_(first.view(16).view(2, 8))
        del first
        third = torch.zeros(4)
    assert memory.now.total() == second.nbytes + third.nbytes == 80
    assert memory.peak.total() == 2 * second.nbytes


@pytest.mark.usefixtures("frequent_switches")
def test_another_thread_may_free_tensors() -> None:
    tensors: SimpleQueue[torch.Tensor | None] = SimpleQueue()

    def free_tensors() -> None:
        while tensors.get() is not None:
            pass

    thread = Thread(target=free_tensors, daemon=True)
    thread.start()
    with MemoryTracker() as memory:
        kept = [torch.empty(4) for _ in range(200)]
        for _ in range(1000):
            tensors.put(torch.empty(8))
        tensors.put(None)
        thread.join()
        kept.append(torch.empty(4))
    assert memory.now.total() == sum(each.nbytes for each in kept)
