"""One model in several processes: the first runs the engine, and the others what it says.

Each has a slice of the weights and of the cache. What the first tells the others is whole numbers:
the buffer of a pass, with the slots of each sequence, and which rows of it go through the head.
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
"""In a message: nothing of the kind."""


class Order(IntEnum):
    """What the first process tells the others to do."""

    END = 0
    LOAD = 1
    PASS = 2
    HEAD = 3
    COPY = 4


class Team:
    """The processes that hold every model together: usually this one alone.

    Attributes:
        share: the slice of this process; None where it is alone.
        device: where it runs.
    """

    def __init__(self, share: Share | None, device: torch.device) -> None:
        self.share, self.device = share, device
        self.wire: Wire | None = None
        self.count = 0

    @classmethod
    def of(cls, size: int, device: torch.device, quantize: str | None) -> Team:
        """A team of `size` processes; `ValueError` where they were not started so."""
        check_type("tensor_parallel", size, int)
        if size < 1:
            message = f"tensor_parallel must be at least 1, not {size}"
            raise OptionError("tensor_parallel", size, message)
        if size == 1:
            return cls(None, device)
        if quantize is not None:
            message = f"quantize={quantize!r} is for a model in one process; leave it out"
            raise OptionError("quantize", quantize, message)
        return cls(*join(size, device))

    def divide(self, target: Stack, load: Callable[[str], Stack], attention: str) -> None:
        """Let the first process lead and the others follow, who end in here.

        `load` is for further models, `attention` the back end.
        """
        if self.share is None:
            return
        self.wire = Wire()
        atexit.register(self.close)
        if self.share.rank:
            wire, self.wire = self.wire, None
            follow(wire, target, load, attention)
            raise SystemExit

    def close(self) -> None:
        """Let the others end."""
        if self.wire is not None:
            wire, self.wire = self.wire, None
            with suppress(Lost):  # nobody is left to be told, and it was said why
                wire.send([Order.END])

    def runner(self, name: str, model: Stack, **options: Any) -> Runner:
        """The runner of a model; that of a slice has all processes run."""
        if self.wire is None:
            return Runner(name, model, **options)
        runner = LeadingRunner(name, model, wire=self.wire, number=self.count, **options)
        self.wire.send([Order.LOAD, len(runner.cache)], list(name.encode()))
        self.count += 1
        return runner


class LeadingRunner(Runner):
    """Runs one slice, and has the others run."""

    def __init__(self, name: str, model: Stack, *, wire: Wire, number: int, **options: Any) -> None:
        super().__init__(name, model, **options)
        self.wire, self.number = wire, number
        self.cache.told = self.copied

    def copied(self, sources: Sequence[int], pages: Sequence[int]) -> None:
        """Have the same pages written."""
        self.wire.send([Order.COPY, self.number, len(sources)], sources, pages)

    def forward(self, packed: Packed, layers: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Hidden states of the wanted rows, and of all rows those of some layers."""
        last = self.config.layers - 1 in layers
        numbers = self.buffer.array[: sum(packed.sizes)]
        head = [Order.PASS, self.number, last, packed.wanted is None, *packed.sizes]
        self.wire.send(head, numbers, *map(told, packed.batch.spans))
        with together():
            if packed.batch.context is not None:
                dist.broadcast(packed.batch.context[0].contiguous(), 0)
            return super().forward(packed, layers)

    def head(self, hidden: Tensor, rows: slice) -> Tensor:
        """Logits `[r, V]` of some of the hidden states of a pass."""
        self.wire.send([Order.HEAD, self.number, rows.start, rows.stop])
        with together():
            return super().head(hidden, rows)


def told(span: Span) -> list[int]:
    """A span as whole numbers."""
    table = span.pages
    assert isinstance(table, Table)
    stops = [NONE] if span.stops is None else [len(span.stops), *span.stops]
    rows = span.rows.start, span.rows.stop, span.start, span.seen
    return [*rows, *stops, table.size, len(table.pages), *table.pages]


def spans(numbers: list[int]) -> Iterator[Span]:
    """Spans that were told."""
    coming = iter(numbers)

    def take(count: int) -> list[int]:
        return [next(coming) for _ in range(count)]

    for begin in coming:
        end, start, seen, stops = take(4)
        ends = None if stops == NONE else take(stops)
        size, count = take(2)
        table = Table(pages=take(count), size=size)
        yield Span(slice(begin, end), start, seen, ends, table)


@dataclass(slots=True)
class Following:
    """A slice in another process than the first, and the hidden states of its last pass."""

    runner: Runner
    hidden: Tensor | None = None

    @torch.inference_mode()
    def run(self, last: bool, in_order: bool, message: IntArray) -> None:
        """A pass."""
        runner, sizes = self.runner, message[:5].tolist()
        total = sum(sizes)
        numbers, rest = message[5 : 5 + total], message[5 + total :]
        parts = torch.from_numpy(numbers).to(runner.device).split(sizes)
        context = None
        if sizes[4]:
            features = runner.model.norm.weight.new_empty(sizes[4], runner.config.feature_size)
            dist.broadcast(features, 0)
            context = features, parts[4]
        own = list(spans(rest.tolist()))
        batch = Batch(
            ids=parts[0],
            positions=parts[1],
            write=parts[2],
            context=context,
            spans=own,
            numbers=[
                torch.from_numpy(each).to(runner.device) for each in runner.backend.numbers(own)
            ],
        )
        packed = Packed(batch, None if in_order else parts[3], [], sizes)
        self.hidden = runner.forward(packed, {runner.config.layers - 1} if last else ())[0]

    @torch.inference_mode()
    def head(self, rows: slice) -> None:
        """The head, over some rows of the last pass."""
        assert self.hidden is not None
        self.runner.head(self.hidden, rows)

    def copy(self, pages: IntArray, sources: int) -> None:
        """Write pages as others are; without sources, erase them."""
        here = pages[sources:].tolist()
        if sources:
            self.runner.cache.copy(pages[:sources].tolist(), here)
        else:
            self.runner.cache.erase(here)


def follow(wire: Wire, target: Stack, load: Callable[[str], Stack], attention: str) -> None:
    """Do what the first process says, until it ends; further models are loaded by name."""
    models: list[Following] = []
    if current_thread() is main_thread():
        # Whoever ends all processes means the first, which may have answers to finish.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    while True:
        message = wire.receive()
        order, *rest = message[:4].tolist()
        match order:
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
