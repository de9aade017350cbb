"""The processes that hold one model together, and the one wire over which the first leads."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock

import numpy as np
import torch
import torch.distributed as dist

from outpace.checkpoints.fields import line
from outpace.decoding.forward import IntArray
from outpace.errors import OptionError
from outpace.models.split import Share

FIRST = 4096
"""Whole numbers of a message that all processes expect; what is longer comes behind."""

IDLE = timedelta(days=365)
"""A process waits for work as long as the first one lives; a broken connection is seen at once."""


class Lost(SystemExit):
    """The processes cannot go on together, so that each of them ends."""


def join(size: int, device: torch.device) -> tuple[Share, torch.device]:
    """The share of this process among those that were started together, and its device.

    Raises `ValueError` where there are not as many as `size`, or fewer devices.
    """
    command = f"torchrun --nproc-per-node {size} -m outpace …"
    if dist.is_initialized():
        message = "tensor_parallel: this process works for a split model already"
        raise OptionError("tensor_parallel", size, message)
    local = dist.get_node_local_rank(0) if dist.is_torchelastic_launched() else 0
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            raise OptionError(
                "tensor_parallel",
                size,
                f"tensor_parallel={size}: process {local} of this machine has no GPU of its own; "
                f"there are {torch.cuda.device_count()}",
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    except ValueError as error:
        raise OptionError(
            "tensor_parallel",
            size,
            f"tensor_parallel={size} needs {size} processes that were started together, but this "
            f"is one alone: {command}",
        ) from error
    if (found := dist.get_world_size()) != size:
        dist.destroy_process_group()
        raise OptionError(
            "tensor_parallel",
            size,
            f"tensor_parallel={size} needs {size} processes, but {found} were started together: "
            f"{command}, or tensor_parallel={found}",
        )
    atexit.register(dist.destroy_process_group)
    return Share(dist.get_rank(), size), device


@contextmanager
def together() -> Iterator[None]:
    """Work that all processes do at once: whoever leaves it can no longer lead or follow."""
    try:
        yield
    except BaseException as error:
        what = f"{type(error).__name__}: {line(error)}"
        raise Lost(f"outpace: the processes of a split model end, after {what}") from error


class Wire:
    """Whole numbers from the first process to all others, in one broadcast where they are few."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=IDLE)
        self.buffer = torch.empty(FIRST, dtype=torch.int64)
        self.lock = Lock()

    def send(self, *parts: Sequence[int] | IntArray) -> None:
        """Send numbers, one part behind the other."""
        message = torch.from_numpy(np.concatenate([np.asarray(p, dtype=np.int64) for p in parts]))
        few = message[: FIRST - 1]
        with self.lock, together():
            self.buffer[0] = len(message)
            self.buffer[1 : 1 + len(few)] = few
            dist.broadcast(self.buffer, 0, group=self.group)
            if len(message) > len(few):
                dist.broadcast(message[len(few) :], 0, group=self.group)

    def receive(self) -> IntArray:
        """The next numbers; waits for them."""
        with together():
            dist.broadcast(self.buffer, 0, group=self.group)
            message = torch.empty(int(self.buffer[0]), dtype=torch.int64)
            few = message[: FIRST - 1]
            few.copy_(self.buffer[1 : 1 + len(few)])
            if len(message) > len(few):
                dist.broadcast(message[len(few) :], 0, group=self.group)
        return message.numpy()
