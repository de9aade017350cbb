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

from outpace.attention.batch import AttentionBatch, Backend
from outpace.engine.cache import PageTable
from outpace.engine.pack import ScheduledForward
from outpace.errors import OptionError
from outpace.field_types import check_value
from outpace.models.device import check_single_gpu
from outpace.models.transformer import Stack

LOG = logging.getLogger(__name__)

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of a graph; in longer passes, such as prefills, launch overhead does not matter."""

SCRATCH_SLOTS = 128
"""Scratch slots for padding rows: at least the largest gap between two sizes."""

MAX_GRAPHS = 64
"""Most graphs of a model; the least recently used one is dropped."""

HiddenStates = tuple[Tensor, dict[int, Tensor]]
"""Hidden states of all rows, and those of some layers."""

GraphKey = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Identity of a graph: rows of a tile, lengths of all arrays, layers whose states are wanted.

A pass with a tree has longer arrays, so it has another key.
"""


class PassRecorder(Protocol):
    """Records a pass over fixed memory for replay."""

    def __call__(self, run: Callable[[], HiddenStates]) -> tuple[Callable[[], None], HiddenStates]:
        """Return a function that replays the pass, and the states that it then writes."""
        ...


class CudaGraphRecorder:
    """Records on a CUDA device; all graphs share one memory pool, since one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], HiddenStates]) -> tuple[Callable[[], None], HiddenStates]:
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


def make_recorder(graphs: bool, device: torch.device, processes: int) -> PassRecorder | None:
    """Return a recorder of passes on a device; None where graphs are off."""
    check_graphs(graphs, device, processes)
    return CudaGraphRecorder() if graphs else None


def check_graphs(graphs: bool, device: torch.device, processes: int) -> None:
    """Raise `OptionError` where graphs are wanted and not available."""
    check_value("graphs", graphs, bool)
    if graphs:
        check_single_gpu("graphs", device, processes)


@dataclass(slots=True)
class Graph:
    """A recorded pass."""

    inputs: list[Tensor]
    """Its integer tensors, in the order of `batch_arrays`."""
    replay: Callable[[], None]
    """Runs the pass over the inputs."""
    states: HiddenStates
    """Results of the last replay."""

    def replay_with(self, given: Sequence[Tensor]) -> HiddenStates:
        """Replay the pass over other inputs; results are valid until the next replay."""
        torch._foreach_copy_(self.inputs, list(given))
        self.replay()
        return self.states


class GraphCache:
    """Recorded passes of one model; a new shape is recorded when it first runs."""

    def __init__(
        self, model: Stack, backend: Backend, spare: PageTable, record: PassRecorder
    ) -> None:
        from outpace.attention.paged import PagedAttention  # imported late, since it loads Triton

        assert isinstance(backend, PagedAttention)
        if model.config.delta is not None:
            raise OptionError("graphs", True, "cannot record gated delta layers: omit graphs")
        if model.config.experts:
            raise OptionError(
                "graphs", True, "cannot record a mixture of experts, which waits for the host"
            )
        self.model, self.backend, self.scratch, self.record = model, backend, spare, record
        self.graphs: dict[GraphKey, Graph] = {}

    def pad_pass(self, forwards: Sequence[ScheduledForward]) -> Sequence[ScheduledForward]:
        """Return the forwards, with a dummy one that pads the pass to the next size."""
        rows = sum(len(forward.ids) for forward in forwards)
        index = bisect_left(GRAPH_SIZES, rows)
        if (
            index == len(GRAPH_SIZES)
            or GRAPH_SIZES[index] == rows
            or any(each.context is not None or each.features is not None for each in forwards)
        ):
            return forwards
        count = GRAPH_SIZES[index] - rows
        padding = ScheduledForward(
            ids=[0] * count, positions=[0] * count, start=0, table=self.scratch, rows=[], slots=[]
        )
        return [*forwards, padding]

    def run_pass(self, batch: AttentionBatch, layers: Collection[int]) -> HiddenStates | None:
        """Return what `Stack.capture_layers` does; None where a pass cannot be recorded."""
        inputs = batch_arrays(batch)
        if (
            len(batch.ids) not in GRAPH_SIZES
            or batch.context
            or batch.features
            or self.model.config.convolution is not None
        ):
            return None
        tile = self.backend.work_grid(batch.spans).rows
        key = tile, tuple(map(len, inputs)), tuple(sorted(layers))
        graph = self.graphs.pop(key, None) or self.record_graph(batch, layers)
        self.graphs[key] = graph
        if len(self.graphs) > MAX_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        return graph.replay_with(inputs)

    def record_graph(self, batch: AttentionBatch, layers: Collection[int]) -> Graph:
        """Record a pass over copies of a batch's arrays."""
        ids, positions, write, *rest = fixed = [each.clone() for each in batch_arrays(batch)]
        fixed_batch = replace(
            batch, ids=ids, positions=positions, write_slots=write, plan_arrays=rest
        )

        def run_model() -> HiddenStates:
            attend = self.backend.plan_pass(fixed_batch)
            return self.model.capture_layers(ids, positions, attend, layers, None, None, ())

        LOG.info("graphs: recorded %d rows, graph %d", len(ids), len(self.graphs) + 1)
        return Graph(fixed, *self.record(run_model))


def batch_arrays(batch: AttentionBatch) -> list[Tensor]:
    return [batch.ids, batch.positions, batch.write_slots, *batch.plan_arrays]
