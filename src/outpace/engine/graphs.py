"""Passes as CUDA graphs: all kernels of a model in one launch, once a shape has come before.

A graph has a fixed number of rows and of items of work. So a pass is filled up to the next size:
with rows of a sequence that is nobody's, in memory of nobody, and with items that do nothing.
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
"""Rows of a graph; longer passes, as of prompts, take so long that launches do not count."""

SPARE = 128
"""Slots of nobody's memory: at least the rows between two sizes."""

KEPT = 64
"""Graphs of a model; of more, the one that was of no use for longest goes."""

States = tuple[Tensor, dict[int, Tensor]]
"""Hidden states of all rows, and those of some layers."""

Key = tuple[int, tuple[int, ...], tuple[int, ...]]
"""What must be the same: rows of a tile, lengths of all numbers, layers whose states are wanted.

A tree makes what is said of each row longer, so it is told by these lengths.
"""


class Record(Protocol):
    """How a pass over fixed memory becomes something that can run again."""

    def __call__(self, run: Callable[[], States]) -> tuple[Callable[[], None], States]:
        """What runs it again, and where its results will be then."""
        ...


class Recorder:
    """Records on a CUDA device; all graphs share one pool of memory, since one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], States]) -> tuple[Callable[[], None], States]:
        """Run once on a side stream, which compiles kernels and makes workspaces; then record."""
        aside, usual = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(usual)
        with torch.cuda.stream(aside):
            run()
        usual.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device for something else meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            states = run()
        return graph.replay, states


def recorder(graphs: bool, device: torch.device, processes: int) -> Record | None:
    """What records the passes of all models on a device, where graphs are wanted.

    Raises `ValueError` where there can be none.
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
        fixed: its whole numbers, in the order of `numbers`.
        replay: what runs it over them.
        states: where its results are then.
    """

    fixed: list[Tensor]
    replay: Callable[[], None]
    states: States

    def run(self, given: Sequence[Tensor]) -> States:
        """The same pass over other numbers; results are good until the next one."""
        torch._foreach_copy_(self.fixed, list(given))
        self.replay()
        return self.states


class Graphs:
    """The recorded passes of one model; a shape that is new is recorded as it comes.

    Raises `ValueError` for a model whose passes cannot be recorded.
    """

    def __init__(self, model: Stack, backend: Backend, spare: Table, record: Record) -> None:
        from outpace.attention.paged import Paged  # only now, since it loads Triton

        assert isinstance(backend, Paged)
        if model.config.experts:
            message = "graphs: layers of experts wait for the host; leave graphs out"
            raise OptionError("graphs", True, message)
        self.model, self.backend, self.spare, self.record = model, backend, spare, record
        self.found: dict[Key, Graph] = {}

    def filled(self, feeds: Sequence[Feed]) -> Sequence[Feed]:
        """Feeds and, behind them, one of nobody that fills a pass up to the next size."""
        rows = sum(len(feed.ids) for feed in feeds)
        place = bisect_left(SIZES, rows)
        if place == len(SIZES) or SIZES[place] == rows or not all(map(plain, feeds)):
            return feeds
        count = SIZES[place] - rows
        nobody = Feed(
            ids=[0] * count,
            positions=[0] * count,
            start=0,
            table=self.spare,
            rows=[],
            slots=[],
        )
        return [*feeds, nobody]

    def run(self, batch: Batch, layers: Collection[int]) -> States | None:
        """Hidden states as `Stack.capture` gives them; None where a pass cannot be recorded."""
        given = numbers(batch)
        if not batch.numbers or len(batch.ids) not in SIZES or batch.context or batch.features:
            return None
        tile = self.backend.grid(batch.spans).rows
        key = tile, tuple(map(len, given)), tuple(sorted(layers))
        graph = self.found.pop(key, None) or self.recorded(batch, layers)
        self.found[key] = graph
        if len(self.found) > KEPT:
            del self.found[next(iter(self.found))]
        return graph.run(given)

    def recorded(self, batch: Batch, layers: Collection[int]) -> Graph:
        """A pass over numbers of its own, as long as those of a batch."""
        ids, positions, write, *rest = fixed = [each.clone() for each in numbers(batch)]
        own = replace(batch, ids=ids, positions=positions, write=write, numbers=rest)

        def run() -> States:
            attend = self.backend.plan(own)
            return self.model.capture(ids, positions, attend, layers, None, None, ())

        LOG.info("graphs: %d rows recorded, the %dth", len(ids), len(self.found) + 1)
        return Graph(fixed, *self.record(run))


def plain(feed: Feed) -> bool:
    """Whether a forward is ids alone."""
    return feed.context is None and feed.features is None


def numbers(batch: Batch) -> list[Tensor]:
    """All whole numbers of a batch."""
    return [batch.ids, batch.positions, batch.write, *batch.numbers]
