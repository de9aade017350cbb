"""CUDA graphs: all kernels of a pass in one launch, for shapes that have run before.

A graph has a fixed number of rows and of work items. So a pass is padded to the next size with rows
of a dummy sequence in scratch slots, and with work items that do nothing.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from outpace.attention.batch import Backend, Batch
from outpace.engine.cache import Table
from outpace.engine.feed import Feed
from outpace.errors import OptionError
from outpace.methods.method import check_type
from outpace.models.device import check_single_gpu
from outpace.models.transformer import Stack

LOG = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of a graph; in longer passes, such as prefills, launch overhead does not matter."""

SPARE = 128
"""Scratch slots for padding rows: at least the largest gap between two sizes."""

KEPT = 64
"""Most graphs of a model; the least recently used one is dropped."""

States = tuple[Tensor, dict[int, Tensor]]
"""Hidden states of all rows, and those of some layers."""

Key = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Identity of a graph: rows of a tile, lengths of all arrays, layers whose states are wanted.

A pass with a tree has longer arrays, so it has another key.
"""


class Record(Protocol):
    """Records a pass over fixed memory for replay."""

    def __call__(self, run: Callable[[], States]) -> tuple[Callable[[], None], States]:
        """Return a function that replays the pass, and the states that it then writes."""
        ...


class Recorder:
    """Records on a CUDA device; all graphs share one memory pool, since one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], States]) -> tuple[Callable[[], None], States]:
        """Run once on a side stream to compile kernels and allocate workspaces; then record."""
        side_stream, main_stream = torch.cuda.Stream(), torch.cuda.current_stream()
        side_stream.wait_stream(main_stream)
        with torch.cuda.stream(side_stream):
            run()
        main_stream.wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device at the same time.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            states = run()
        return graph.replay, states


def recorder(graphs: bool, device: torch.device, processes: int) -> Record | None:
    """Return a recorder of passes on a device; None where graphs are off.

    Raises:
        ValueError: graphs are not available here.
    """
    check_type("graphs", graphs, bool)
    if not graphs:
        return None
    check_single_gpu("graphs", device, processes)
    return Recorder()


@dataclass(slots=True)
class Graph:
    """A recorded pass.

    Attributes:
        inputs: its integer tensors, in the order of `batch_arrays`.
        replay: runs the pass over them.
        states: results of the last replay.
    """

    fixed: list[Tensor]
    replay: Callable[[], None]
    states: States

    def run(self, given: Sequence[Tensor]) -> States:
        """Replay the pass over other inputs; results are valid until the next replay."""
        torch._foreach_copy_(self.fixed, list(given))
        self.replay()
        return self.states


class Graphs:
    """Recorded passes of one model; a new shape is recorded when it first runs.

    Raises:
        ValueError: passes of the model cannot be recorded.
    """

    def __init__(self, model: Stack, backend: Backend, spare: Table, record: Record) -> None:
        from outpace.attention.paged import Paged  # imported late, since it loads Triton

        assert isinstance(backend, Paged)
        if model.config.experts:
            message = (
                "graphs are not available for mixture-of-experts models, which wait for the host"
            )
            raise OptionError("graphs", True, message)
        self.model, self.backend, self.spare, self.record = model, backend, spare, record
        self.found: dict[Key, Graph] = {}

    def filled(self, forwards: Sequence[Feed]) -> Sequence[Feed]:
        """Return the forwards, with a dummy one that pads the pass to the next size."""
        rows = sum(len(forward.ids) for forward in forwards)
        index = bisect_left(SIZES, rows)
        if index == len(SIZES) or SIZES[index] == rows or not all(map(plain, forwards)):
            return forwards
        count = SIZES[index] - rows
        padding = Feed(
            ids=[0] * count,
            positions=[0] * count,
            start=0,
            table=self.spare,
            rows=[],
            slots=[],
        )
        return [*forwards, padding]

    def run(self, batch: Batch, layers: Collection[int]) -> States | None:
        """Return hidden states as `Stack.capture` does; None where a pass cannot be recorded."""
        inputs = numbers(batch)
        if not batch.numbers or len(batch.ids) not in SIZES or batch.context or batch.features:
            return None
        tile = self.backend.grid(batch.spans).rows
        key = tile, tuple(map(len, inputs)), tuple(sorted(layers))
        graph = self.found.pop(key, None) or self.recorded(batch, layers)
        self.found[key] = graph
        if len(self.found) > KEPT:
            del self.found[next(iter(self.found))]
        return graph.run(inputs)

    def recorded(self, batch: Batch, layers: Collection[int]) -> Graph:
        """Record a pass over copies of a batch's arrays."""
        ids, positions, write, *rest = fixed = [each.clone() for each in numbers(batch)]
        fixed_batch = replace(batch, ids=ids, positions=positions, write=write, numbers=rest)

        def run() -> States:
            attend = self.backend.plan(fixed_batch)
            return self.model.capture(ids, positions, attend, layers, None, None, ())

        LOG.info("graphs: recorded %d rows, graph %d", len(ids), len(self.found) + 1)
        return Graph(fixed, *self.record(run))


def plain(forward: Feed) -> bool:
    """Return whether a forward has neither context nor features."""
    return forward.context is None and forward.features is None


def numbers(batch: Batch) -> list[Tensor]:
    """Return all integer tensors of a batch."""
    return [batch.ids, batch.positions, batch.write, *batch.numbers]
