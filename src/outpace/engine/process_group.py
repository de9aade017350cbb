"""The processes of a tensor-parallel group, and the broadcast of commands from its rank 0."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock

import numpy as np
import torch
import torch.distributed as dist

from outpace.checkpoints.fields import error_line
from outpace.decoding.forward import IntArray
from outpace.errors import OptionError
from outpace.models.split import ModelShard

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
        message = "tensor_parallel: this process already belongs to a tensor-parallel group"
        raise OptionError("tensor_parallel", size, message)
    rank = dist.get_node_local_rank(0) if dist.is_torchelastic_launched() else 0
    if device.type == "cuda":
        if rank >= torch.cuda.device_count():
            raise OptionError(
                "tensor_parallel",
                size,
                f"tensor_parallel={size}: process {rank} of this machine has no GPU; "
                f"there are {torch.cuda.device_count()}",
            )
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    except ValueError as error:
        raise OptionError(
            "tensor_parallel",
            size,
            f"tensor_parallel={size} needs {size} processes that were started together, but this "
            f"is a single one: {command}",
        ) from error
    if (actual := dist.get_world_size()) != size:
        dist.destroy_process_group()
        raise OptionError(
            "tensor_parallel",
            size,
            f"tensor_parallel={size} needs {size} processes, but {actual} were started together: "
            f"{command}, or tensor_parallel={actual}",
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
