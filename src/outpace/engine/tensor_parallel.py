"""Tensor parallelism: rank 0 runs the engine, and the other ranks execute its broadcasts.

Each rank has a slice of the weights and of the cache. Commands are integers: the buffer of a pass,
with the slots of each sequence, and the rows of it that go through the head.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from threading import Lock, current_thread, main_thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from outpace.attention.batch import AttentionBatch, RowSpan
from outpace.checkpoints.fields import error_line
from outpace.decoding.forward import IntArray
from outpace.engine.cache import PAGE_SIZE, PageTable
from outpace.engine.pack import PackedPass
from outpace.engine.runner import Runner
from outpace.errors import OptionError
from outpace.field_types import PositiveInt, check_value
from outpace.models.split import ModelShard
from outpace.models.transformer import Stack

FIXED_MESSAGE_LENGTH = 4096
"""Integers in a message of fixed length; the rest follows in a second broadcast."""

IDLE_TIMEOUT = timedelta(days=365)
"""Workers wait for commands without limit; a broken connection is detected immediately."""


class ProcessGroupError(SystemExit):
    """A collective operation failed, so every process of the group exits."""


def join_group(size: int, device: torch.device) -> tuple[ModelShard, torch.device]:
    """Join the process group; return the share of this process and its device.

    Raises:
        ValueError: the group does not have `size` processes, or a process has no GPU.
    """
    command = f"torchrun --nproc-per-node {size} -m outpace …"
    if dist.is_initialized():
        raise OptionError(
            "tensor_parallel", size, "this process already belongs to a tensor-parallel group"
        )
    rank = dist.get_node_local_rank(0) if dist.is_torchelastic_launched() else 0
    if device.type == "cuda":
        if rank >= torch.cuda.device_count():
            raise OptionError(
                "tensor_parallel",
                size,
                f"process {rank} here has no GPU; there are {torch.cuda.device_count()}",
            )
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    except ValueError as error:
        raise OptionError(
            "tensor_parallel", size, f"needs {size} processes that were started together: {command}"
        ) from error
    if (actual := dist.get_world_size()) != size:
        dist.destroy_process_group()
        raise OptionError(
            "tensor_parallel",
            size,
            f"needs {size} processes, and {actual} were started: {command}, or set {actual}",
        )
    atexit.register(dist.destroy_process_group)
    return ModelShard(dist.get_rank(), size), device


@contextmanager
def collective() -> Iterator[None]:
    """Run a collective operation; after an exception this process cannot continue in the group."""
    try:
        yield
    except BaseException as error:
        reason = f"{type(error).__name__}: {error_line(error)}"
        raise ProcessGroupError(
            f"outpace: the processes of a split model end, after {reason}"
        ) from error


class CommandBroadcast:
    """Integers from rank 0 to all other ranks, in one broadcast where they are few."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        self.buffer = torch.empty(FIXED_MESSAGE_LENGTH, dtype=torch.int64)
        self.lock = Lock()

    def send(self, *parts: Sequence[int] | IntArray) -> None:
        """Broadcast numbers, the parts concatenated."""
        message = torch.from_numpy(np.concatenate([np.asarray(p, dtype=np.int64) for p in parts]))
        few = message[: FIXED_MESSAGE_LENGTH - 1]
        with self.lock, collective():
            # Other ranks do not expect a length, so the first broadcast always has the same size.
            self.buffer[0] = len(message)
            self.buffer[1 : 1 + len(few)] = few
            dist.broadcast(self.buffer, 0, group=self.group)
            if len(message) > len(few):
                dist.broadcast(message[len(few) :], 0, group=self.group)

    def receive(self) -> IntArray:
        """Wait for the next message and return its numbers."""
        with collective():
            dist.broadcast(self.buffer, 0, group=self.group)
            message = torch.empty(int(self.buffer[0]), dtype=torch.int64)
            few = message[: FIXED_MESSAGE_LENGTH - 1]
            few.copy_(self.buffer[1 : 1 + len(few)])
            if len(message) > len(few):
                dist.broadcast(message[len(few) :], 0, group=self.group)
        return message.numpy()


ABSENT = -1
"""Marks a missing field in a message."""


class GroupCommand(IntEnum):
    """Commands of rank 0 to the other ranks."""

    END = 0
    LOAD = 1
    PASS = 2
    HEAD = 3
    COPY = 4


class TensorParallelGroup:
    """The processes that hold every model together, usually this one only.

    Attributes:
        share: slice of this process; None where it is the only one.
        device: device of this process.
    """

    def __init__(self, share: ModelShard | None, device: torch.device) -> None:
        self.share, self.device = share, device
        self.broadcast: CommandBroadcast | None = None
        self.num_models = 0

    @property
    def size(self) -> int:
        return 1 if self.share is None else self.share.size

    @classmethod
    def join_processes(
        cls, size: int, device: torch.device, quantize: str | None
    ) -> TensorParallelGroup:
        """Join a group of `size` processes; raise `ValueError` where they were not started."""
        check_value("tensor_parallel", size, PositiveInt)
        if size == 1:
            return cls(None, device)
        if quantize is not None:
            raise OptionError(
                "quantize", quantize, f"{quantize!r} cannot be combined with tensor_parallel"
            )
        return cls(*join_group(size, device))

    def start_workers(self, target: Stack, load: Callable[[str], Stack], **options: Any) -> None:
        """Split into a leader and workers; a worker runs here until the group ends, then exits.

        Args:
            target: the target model.
            load: loads further models by name.
            **options: those of each runner.
        """
        if self.share is None:
            return
        self.broadcast = CommandBroadcast()
        atexit.register(self.close)
        if self.share.rank:
            broadcast, self.broadcast = self.broadcast, None
            run_worker(broadcast, target, load, options)
            raise SystemExit

    def close(self) -> None:
        """Send the workers the command to end."""
        if self.broadcast is not None:
            broadcast, self.broadcast = self.broadcast, None
            with suppress(ProcessGroupError):  # the workers have exited, and the error was reported
                broadcast.send([GroupCommand.END])

    def make_runner(self, name: str, model: Stack, **options: Any) -> Runner:
        """Return the runner of a model, which in a group leads all ranks."""
        if self.broadcast is None:
            return Runner(name, model, **options)
        runner = LeadingRunner(
            name, model, broadcast=self.broadcast, number=self.num_models, **options
        )
        self.broadcast.send([GroupCommand.LOAD, len(runner.cache)], list(name.encode()))
        self.num_models += 1
        return runner


class LeadingRunner(Runner):
    """Runs the slice of rank 0 and broadcasts each operation to the other ranks."""

    def __init__(
        self, name: str, model: Stack, *, broadcast: CommandBroadcast, number: int, **options: Any
    ) -> None:
        super().__init__(name, model, **options)
        self.broadcast, self.model_number = broadcast, number
        self.cache.on_write = self.broadcast_copy

    def broadcast_copy(self, sources: Sequence[int], pages: Sequence[int]) -> None:
        """Broadcast that pages are copied or erased."""
        self.broadcast.send([GroupCommand.COPY, self.model_number, len(sources)], sources, pages)

    def run_model(
        self, packed: PackedPass, layers: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return hidden states of the wanted rows, and those of some layers for all rows."""
        last = self.config.layers - 1 in layers
        numbers = self.buffer.array[: sum(packed.sizes)]
        head = [GroupCommand.PASS, self.model_number, last, packed.wanted is None, *packed.sizes]
        self.broadcast.send(head, numbers, *map(encode_span, packed.batch.spans))
        with collective():
            if packed.batch.context is not None:
                dist.broadcast(packed.batch.context[0].contiguous(), 0)
            return super().run_model(packed, layers)

    def apply_head(self, hidden: Tensor, rows: slice) -> Tensor:
        """Return the logits `[r, V]` of some of the hidden states of a pass."""
        self.broadcast.send([GroupCommand.HEAD, self.model_number, rows.start, rows.stop])
        with collective():
            return super().apply_head(hidden, rows)


def encode_span(span: RowSpan) -> list[int]:
    """Encode a span as integers."""
    table = span.pages
    assert isinstance(table, PageTable)
    stops = [ABSENT] if span.visible_ends is None else [len(span.visible_ends), *span.visible_ends]
    rows = span.rows.start, span.rows.stop, span.start, span.num_visible
    return [*rows, *stops, len(table.pages), *table.pages]


def decode_spans(numbers: list[int]) -> Iterator[RowSpan]:
    """Decode the spans of a message."""
    remaining = iter(numbers)

    def take_numbers(count: int) -> list[int]:
        return [next(remaining) for _ in range(count)]

    for begin in remaining:
        end, start, seen, stops = take_numbers(4)
        ends = None if stops == ABSENT else take_numbers(stops)
        (count,) = take_numbers(1)
        table = PageTable(pages=take_numbers(count), size=count * PAGE_SIZE)
        yield RowSpan(slice(begin, end), start, seen, ends, table)


@dataclass(slots=True)
class WorkerModel:
    """The slice of another rank, and the hidden states of its last pass."""

    runner: Runner
    hidden: Tensor | None = None

    @torch.inference_mode()
    def run_pass(self, last: bool, in_order: bool, message: IntArray) -> None:
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
        local_spans = list(decode_spans(rest.tolist()))
        batch = AttentionBatch(
            ids=parts[0],
            positions=parts[1],
            write_slots=parts[2],
            context=context,
            spans=local_spans,
            plan_arrays=[
                torch.from_numpy(each).to(runner.device)
                for each in runner.backend.plan_arrays(local_spans)
            ],
        )
        packed = PackedPass(batch, None if in_order else parts[3], [], sizes)
        self.hidden = runner.run_model(packed, {runner.config.layers - 1} if last else ())[0]

    @torch.inference_mode()
    def run_head(self, rows: slice) -> None:
        """Run the head over some rows of the last pass."""
        assert self.hidden is not None
        self.runner.apply_head(self.hidden, rows)

    def copy_pages(self, pages: IntArray, sources: int) -> None:
        """Copy pages; erase them where there are no sources."""
        targets = pages[sources:].tolist()
        if sources:
            self.runner.cache.copy_pages(pages[:sources].tolist(), targets)
        else:
            self.runner.cache.erase_pages(targets)


def run_worker(
    broadcast: CommandBroadcast,
    target: Stack,
    load: Callable[[str], Stack],
    options: Mapping[str, Any],
) -> None:
    """Execute the commands of rank 0 until it ends; further models are loaded by name."""
    models: list[WorkerModel] = []
    if current_thread() is main_thread():
        # A signal to the process group is meant for rank 0, which may have answers to finish.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    while True:
        message = broadcast.receive()
        header: list[int] = message[:4].tolist()
        command, *rest = header
        match command:
            case GroupCommand.END:
                return
            case GroupCommand.LOAD:
                name = bytes(message[2:].tolist()).decode()
                model = load(name) if models else target
                runner = Runner(name, model, slots=rest[0], prefix_cache=False, **options)
                models.append(WorkerModel(runner))
            case GroupCommand.PASS:
                models[rest[0]].run_pass(bool(rest[1]), bool(rest[2]), message[4:])
            case GroupCommand.HEAD:
                models[rest[0]].run_head(slice(rest[1], rest[2]))
            case GroupCommand.COPY:
                models[rest[0]].copy_pages(message[3:], rest[1])
