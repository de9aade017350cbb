"""A step of training on tensors without memory, to see what it would allocate.

The code is that of a run. Weights are PyTorch's fake tensors and so is what is computed with them;
ids, labels and ranges are those of the first examples, so that the same rows are fed. Where
processes share out what is trained, a group is pretended whose others are not there.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

# Registers what collectives do to tensors without memory, and groups whose others are not there.
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

from outpace.attention.ranges import HOST
from outpace.models.norm import freeze
from outpace.training.allocated import Allocated
from outpace.training.objective import Models, Objective
from outpace.training.recompute import recompute
from outpace.training.rows import Rows
from outpace.training.scored import Scored
from outpace.training.shard import shard, shard_frozen

TRAINED, FROZEN, GRADIENTS = "trained", "frozen", "gradients"

INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
)


def plain(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices as whole numbers, whose count is known, in the place of truth values."""
    found: list[Tensor | None] = []
    for each in indices:
        if each is None or each.dtype != torch.bool or isinstance(each, FakeTensor):
            found.append(each)
        else:
            found.extend(each.nonzero().unbind(1))
    return found


class Weightless(TorchDispatchMode):
    """Gives new tensors of fractions no memory, and computes no value of them.

    Whole numbers have theirs, so that what is decided by them is decided as in a run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on fake tensors where one is given, or where it makes fractions."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come by here themselves
        kwargs = kwargs or {}
        if func in INDEXING:
            args = args[0], plain(args[1]), *args[2:]
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        if not given or any(isinstance(each, FakeTensor) for each in given):
            with self.fake:
                out = func(*args, **kwargs)
            if given or not isinstance(out, Tensor) or out.is_floating_point():
                return out
        return func(*args, **kwargs)


@contextmanager
def pretended(processes: int) -> Iterator[None]:
    """A group of processes, of which this is the first and the others are not there."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("fake", rank=0, world_size=processes, store=store)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def rehearsed(
    cast: Callable[[], Models],
    objective: Objective,
    portions: Sequence[Rows],
    *,
    processes: int,
    shared: bool,
    again: bool,
    precision: str,
) -> Counter[str]:
    """Bytes of a device when forward and backward passes hold the most, by what they are for.

    Gradients of `portions` are summed up, as in a step with accumulation; what the optimizer keeps
    is not among them. With `again` blocks are recomputed.
    """
    shared = shared and processes > 1
    with pretended(processes) if shared else nullcontext(), Weightless():
        made = cast()
        model, others = made.trained, made.others
        if again:
            recompute(model)
        scored = Scored(objective, Models(model.train(), others), precision)
        if shared:
            mesh = init_device_mesh(HOST.type, (processes,))
            shard_frozen(others.values(), HOST, mesh)
            shard(scored, model, precision, mesh)
        for each in () if shared else others.values():
            freeze(each)
        memory = Allocated(model.config.vocab)
        learnt = [p for p in model.parameters() if p.requires_grad]
        memory.follow(learnt, TRAINED)
        for held in (model, *others.values()):
            memory.follow((*held.parameters(), *held.buffers()), FROZEN)
        if processes > 1 and not shared:
            for parameter in learnt:  # averaged in buckets, which are there all the time
                parameter.grad = torch.zeros_like(parameter)
        for rows in portions:
            memory.rename((p.grad for p in learnt if p.grad is not None), GRADIENTS)
            try:
                with warnings.catch_warnings(), memory:
                    # PyTorch says that a CPU has no fused norm for these dtypes, once.
                    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
                    loss, _ = scored(rows)
                    (loss / rows.mass).backward()
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ValueError(
                    f"a step of this model depends on its values ({error.func}), as where experts "
                    "are chosen, and cannot be planned without them"
                ) from error
            del loss
        return memory.peak
