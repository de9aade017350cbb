"""Weights, gradients and optimizer states that processes share out (FSDP2, Zhao et al., 2023).

Each process keeps some rows of every tensor. A block is gathered when it runs, forwards and
backwards, and its gradients are averaged over the processes that then keep their rows of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from outpace.models.norm import freeze
from outpace.models.transformer import Stack
from outpace.training.optim import Optim
from outpace.training.scored import Scored


def prepared(
    scored: Scored, optim: Optim, accelerator: Accelerator, *, shared: bool
) -> tuple[Any, ...]:
    """What is scored, and its optimizers, as processes run them: alike in each, or shared out.

    Raises `ValueError` for an objective that cannot be shared out.
    """
    others, device = scored.models.others.values(), accelerator.device
    if shared:
        if not scored.objective.even:
            raise ValueError("processes would make unequal passes: unroll = 0, or shard = false")
        shard_frozen(others, device)
        shard(scored, scored.trained, scored.precision)
        return scored, *map(accelerator.prepare, optim.build(scored.trained))
    for each in others:
        freeze(each.to(device))
    alike: tuple[Any, ...] = accelerator.prepare(scored, *optim.build(scored.trained))
    return alike


def shard(scored: nn.Module, model: Stack, precision: str, mesh: DeviceMesh | None = None) -> None:
    """Share out the parameters of a trained model, which is a part of what is `scored`.

    In `bf16` it computes with weights of bfloat16; those that are updated stay as they are, and
    gradients are averaged in float32. The processes are those of `mesh`, by default all.
    """
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    # What goes into a block keeps its dtype: rotary tables may have to be in float32.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False, **half if precision == "bf16" else {})
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # A look at held-out examples runs no backward, behind which the rest would be shared out again.
    fully_shard(scored, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def shard_frozen(
    models: Iterable[Stack], device: torch.device, mesh: DeviceMesh | None = None
) -> None:
    """Share out the blocks of models that only look on; the rest moves to the device."""
    for model in models:
        model.requires_grad_(False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        for name, child in model.named_children():
            # `Module.to` cannot handle fake tensors, of which a plan is made where they are.
            if name != "blocks" and any(p.device != device for p in child.parameters()):
                child.to(device)
        model.cos, model.sin = model.cos.to(device), model.sin.to(device)


def whole(tensor: Tensor) -> Tensor:
    """A tensor in one piece; all processes must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Tensors in one piece, on the host of those processes that `keep` them."""
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor.detach())
        if keep:
            found[name] = full.cpu()
    return found


def own(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this process keeps, in place."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows(tensor: Tensor) -> slice:
    """Which of its rows this process keeps."""
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor))
    begin = -(-len(tensor) // tensor.device_mesh.size()) * tensor.device_mesh.get_local_rank()
    return slice(begin, begin + len(own(tensor)))
