"""Tensor parallelism: rank 0 runs the engine, and the other ranks execute its broadcasts.

Each rank has a slice of the weights and of the cache. Commands are integers: the buffer of a pass,
with the slots of each sequence, and the rows of it that go through the head.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from threading import current_thread, main_thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outpace.attention.batch import Batch, Span
from outpace.decoding.forward import IntArray
from outpace.engine.cache import Table
from outpace.engine.group import Lost, Wire, join, together
from outpace.engine.pack import Packed
from outpace.engine.runner import Runner
from outpace.errors import OptionError
from outpace.methods.method import check_type
from outpace.models.split import Share
from outpace.models.transformer import Stack

NONE = -1
"""Marks a missing field in a message."""


class Order(IntEnum):
    """Commands of rank 0 to the other ranks."""

    END = 0
    LOAD = 1
    PASS = 2
    HEAD = 3
    COPY = 4


class Team:
    """The processes that hold every model together, usually this one only.

    Attributes:
        share: slice of this process; None where it is the only one.
        device: device of this process.
    """

    def __init__(self, share: Share | None, device: torch.device) -> None:
        self.share, self.device = share, device
        self.wire: Wire | None = None
        self.count = 0

    @classmethod
    def of(cls, size: int, device: torch.device, quantize: str | None) -> Team:
        """Join a group of `size` processes; raise `ValueError` where they were not started."""
        check_type("tensor_parallel", size, int)
        if size < 1:
            message = f"tensor_parallel must be at least 1, got {size}"
            raise OptionError("tensor_parallel", size, message)
        if size == 1:
            return cls(None, device)
        if quantize is not None:
            message = f"quantize={quantize!r} cannot be combined with tensor_parallel"
            raise OptionError("quantize", quantize, message)
        return cls(*join(size, device))

    def divide(self, target: Stack, load: Callable[[str], Stack], attention: str) -> None:
        """Split into a leader and workers; a worker runs here until the group ends, then exits.

        Args:
            target: the target model.
            load: loads further models by name.
            attention: attention back end.
        """
        if self.share is None:
            return
        self.wire = Wire()
        atexit.register(self.close)
        if self.share.rank:
            broadcast, self.wire = self.wire, None
            follow(broadcast, target, load, attention)
            raise SystemExit

    def close(self) -> None:
        """Send the workers the command to end."""
        if self.wire is not None:
            broadcast, self.wire = self.wire, None
            with suppress(Lost):  # the workers have exited, and the error was reported
                broadcast.send([Order.END])

    def runner(self, name: str, model: Stack, **options: Any) -> Runner:
        """Return the runner of a model, which in a group leads all ranks."""
        if self.wire is None:
            return Runner(name, model, **options)
        runner = LeadingRunner(name, model, wire=self.wire, number=self.count, **options)
        self.wire.send([Order.LOAD, len(runner.cache)], list(name.encode()))
        self.count += 1
        return runner


class LeadingRunner(Runner):
    """Runs the slice of rank 0 and broadcasts each operation to the other ranks."""

    def __init__(self, name: str, model: Stack, *, wire: Wire, number: int, **options: Any) -> None:
        super().__init__(name, model, **options)
        self.wire, self.number = wire, number
        self.cache.told = self.copied

    def copied(self, sources: Sequence[int], pages: Sequence[int]) -> None:
        """Broadcast that pages are copied or erased."""
        self.wire.send([Order.COPY, self.number, len(sources)], sources, pages)

    def forward(self, packed: Packed, layers: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Return hidden states of the wanted rows, and those of some layers for all rows."""
        last = self.config.layers - 1 in layers
        numbers = self.buffer.array[: sum(packed.sizes)]
        head = [Order.PASS, self.number, last, packed.wanted is None, *packed.sizes]
        self.wire.send(head, numbers, *map(told, packed.batch.spans))
        with together():
            if packed.batch.context is not None:
                dist.broadcast(packed.batch.context[0].contiguous(), 0)
            return super().forward(packed, layers)

    def head(self, hidden: Tensor, rows: slice) -> Tensor:
        """Return the logits `[r, V]` of some of the hidden states of a pass."""
        self.wire.send([Order.HEAD, self.number, rows.start, rows.stop])
        with together():
            return super().head(hidden, rows)


def told(span: Span) -> list[int]:
    """Encode a span as integers."""
    table = span.pages
    assert isinstance(table, Table)
    stops = [NONE] if span.stops is None else [len(span.stops), *span.stops]
    rows = span.rows.start, span.rows.stop, span.start, span.seen
    return [*rows, *stops, table.size, len(table.pages), *table.pages]


def spans(numbers: list[int]) -> Iterator[Span]:
    """Decode the spans of a message."""
    remaining = iter(numbers)

    def take(count: int) -> list[int]:
        return [next(remaining) for _ in range(count)]

    for begin in remaining:
        end, start, seen, stops = take(4)
        ends = None if stops == NONE else take(stops)
        size, count = take(2)
        table = Table(pages=take(count), size=size)
        yield Span(slice(begin, end), start, seen, ends, table)


@dataclass(slots=True)
class Following:
    """The slice of another rank, and the hidden states of its last pass."""

    runner: Runner
    hidden: Tensor | None = None

    @torch.inference_mode()
    def run(self, last: bool, in_order: bool, message: IntArray) -> None:
        """Run a pass that rank 0 has broadcast."""
        runner, sizes = self.runner, message[:5].tolist()
        total = sum(sizes)
        numbers, rest = message[5 : 5 + total], message[5 + total :]
        parts = torch.from_numpy(numbers).to(runner.device).split(sizes)
        context = None
        if sizes[4]:
            features = runner.model.norm.weight.new_empty(sizes[4], runner.config.feature_size)
            dist.broadcast(features, 0)
            context = features, parts[4]
        local_spans = list(spans(rest.tolist()))
        batch = Batch(
            ids=parts[0],
            positions=parts[1],
            write=parts[2],
            context=context,
            spans=local_spans,
            numbers=[
                torch.from_numpy(each).to(runner.device)
                for each in runner.backend.numbers(local_spans)
            ],
        )
        packed = Packed(batch, None if in_order else parts[3], [], sizes)
        self.hidden = runner.forward(packed, {runner.config.layers - 1} if last else ())[0]

    @torch.inference_mode()
    def head(self, rows: slice) -> None:
        """Run the head over some rows of the last pass."""
        assert self.hidden is not None
        self.runner.head(self.hidden, rows)

    def copy(self, pages: IntArray, sources: int) -> None:
        """Copy pages; erase them where there are no sources."""
        targets = pages[sources:].tolist()
        if sources:
            self.runner.cache.copy(pages[:sources].tolist(), targets)
        else:
            self.runner.cache.erase(targets)


def follow(broadcast: Wire, target: Stack, load: Callable[[str], Stack], attention: str) -> None:
    """Execute the commands of rank 0 until it ends; further models are loaded by name."""
    models: list[Following] = []
    if current_thread() is main_thread():
        # A signal to the process group is meant for rank 0, which may have answers to finish.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    while True:
        message = broadcast.receive()
        command, *rest = message[:4].tolist()
        match command:
            case Order.END:
                return
            case Order.LOAD:
                name = bytes(message[2:].tolist()).decode()
                model = load(name) if models else target
                runner = Runner(name, model, slots=rest[0], prefix_cache=False, attention=attention)
                models.append(Following(runner))
            case Order.PASS:
                models[rest[0]].run(bool(rest[1]), bool(rest[2]), message[4:])
            case Order.HEAD:
                models[rest[0]].head(slice(rest[1], rest[2]))
            case Order.COPY:
                models[rest[0]].copy(message[3:], rest[1])
