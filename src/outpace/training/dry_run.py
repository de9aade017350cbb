"""Dry run of a training step on fake tensors, to measure the memory it would allocate.

The code is that of a real run. Weights and everything computed from them are PyTorch's fake
tensors; ids, labels and ranges are real, from the first examples. Sharding uses a fake process
group in which only this process exists.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

# Imported to register collectives on fake tensors, and the fake process group.
import torch.distributed._meta_registrations
import torch.testing._internal.distributed.fake_pg
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from outpace.attention.ranges import CPU_DEVICE
from outpace.models.norm import freeze_model
from outpace.training.loss_module import LossModule, ignore_norm_advice
from outpace.training.memory_tracker import MemoryTracker
from outpace.training.objective import Models, Objective
from outpace.training.recompute import recompute_blocks
from outpace.training.rows import Rows
from outpace.training.shard import shard_frozen, shard_model

TRAINED, FROZEN, GRADIENTS = "trained", "frozen", "gradients"

INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
)


def integer_indices(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replace boolean indices by integer ones, so that the shape of the result is known."""
    converted: list[Tensor | None] = []
    for each in indices:
        if each is None or each.dtype != torch.bool or isinstance(each, FakeTensor):
            converted.append(each)
        else:
            converted.extend(each.nonzero().unbind(1))
    return converted


class FakeFloatMode(TorchDispatchMode):
    """Makes new floating-point tensors fake, without memory or values.

    Integer tensors stay real, so that control flow that depends on them is that of a real run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on fake tensors if an argument is fake or the result is a float."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors are dispatched here separately
        kwargs = kwargs or {}
        if func in INDEXING:
            args = args[0], integer_indices(args[1]), *args[2:]
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        if not tensors or any(isinstance(each, FakeTensor) for each in tensors):
            with self.fake:
                out = func(*args, **kwargs)
            if tensors or not isinstance(out, Tensor) or out.is_floating_point():
                return out
        return func(*args, **kwargs)


@contextmanager
def fake_process_group(processes: int) -> Iterator[None]:
    """Create a fake process group of this size, with this process as rank 0."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("fake", rank=0, world_size=processes, store=store)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def measure_peak_memory(
    load_models: Callable[[], Models],
    objective: Objective,
    micro_batches: Sequence[Rows],
    *,
    processes: int,
    sharded: bool,
    recomputes: bool,
    precision: str,
) -> Counter[str]:
    """Return the peak bytes of a device during forward and backward passes, by use.

    Gradients of `micro_batches` are accumulated. Optimizer states are not included. With
    `recomputes`, blocks use gradient checkpointing.

    Raises:
        ValueError: shapes depend on values, as in a mixture of experts.
    """
    sharded = sharded and processes > 1
    with fake_process_group(processes) if sharded else nullcontext(), FakeFloatMode():
        models = load_models()
        model, others = models.trained, models.others
        if recomputes:
            recompute_blocks(model)
        scored = LossModule(objective, Models(model.train(), others), precision)
        if sharded:
            mesh = init_device_mesh(CPU_DEVICE.type, (processes,))
            shard_frozen(others.values(), CPU_DEVICE, mesh)
            shard_model(scored, model, precision, mesh)
        for each in () if sharded else others.values():
            freeze_model(each)
        memory = MemoryTracker(model.config.draft_vocab or model.config.vocab)
        trainable = [p for p in model.parameters() if p.requires_grad]
        memory.track_tensors(trainable, TRAINED)
        for module in (model, *others.values()):
            memory.track_tensors((*module.parameters(), *module.buffers()), FROZEN)
        if processes > 1 and not sharded:
            for parameter in trainable:  # DDP's gradient buckets exist during the whole step
                parameter.grad = torch.zeros_like(parameter)
        for rows in micro_batches:
            memory.relabel_tensors((p.grad for p in trainable if p.grad is not None), GRADIENTS)
            try:
                with warnings.catch_warnings(), memory:
                    ignore_norm_advice()
                    loss, _ = scored(rows)
                    (loss / rows.normaliser).backward()
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ValueError(
                    f"the memory of this model cannot be planned: shapes depend on values "
                    f"({error.func}), as in a mixture of experts"
                ) from error
            del loss
        return memory.peak
