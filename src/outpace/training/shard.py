"""Sharding of weights, gradients and optimizer states over processes (FSDP2, Zhao et al., 2023).

Each process holds some rows of every tensor. A block is gathered for its forward and backward
pass; its gradients are then reduce-scattered, averaged over the processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from outpace.models.norm import freeze_model
from outpace.models.transformer import Stack
from outpace.training.objective import LossModule
from outpace.training.optim import Optim


def prepare_training(
    scored: LossModule, optim: Optim, accelerator: Accelerator, *, sharded: bool
) -> tuple[Any, ...]:
    """Wrap a loss module and its optimizers for data parallelism: replicated, or sharded."""
    others, device = scored.models.others.values(), accelerator.device
    if sharded:
        if not scored.objective.has_fixed_forwards:
            raise ValueError(
                "shard needs equally many forwards in every process, which unroll does not give; "
                "set unroll = 0 or shard = false"
            )
        shard_frozen(others, device)
        shard_model(scored, scored.trained, scored.precision)
        return scored, *map(accelerator.prepare, optim.build_optimizers(scored.trained))
    for each in others:
        freeze_model(each.to(device))
    replicated: tuple[Any, ...] = accelerator.prepare(
        scored, *optim.build_optimizers(scored.trained)
    )
    return replicated


def shard_model(scored: nn.Module, model: Stack, precision: str) -> None:
    """Shard the parameters of a trained model, a submodule of the loss module `scored`."""
    # In `bf16` forwards use bfloat16 copies of the weights; master weights and gradient reduction
    # stay in float32.
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    # Inputs of a block keep their dtype: rotary tables may have to be in float32.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False, **half if precision == "bf16" else {})
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    # Validation runs no backward, after which the root's parameters would be resharded otherwise.
    fully_shard(scored, mp_policy=policy, reshard_after_forward=True)


def shard_frozen(models: Iterable[Stack], device: torch.device) -> None:
    for model in models:
        model.requires_grad_(False)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=True)
        for name, child in model.named_children():
            if name != "blocks":
                child.to(device)
        model.cos, model.sin = model.cos.to(device), model.sin.to(device)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor; a collective operation."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_tensors(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Gather tensors one by one; only processes with `keep` store them, on the host."""
    found = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor.detach())
        if keep:
            found[name] = full.cpu()
    return found


def local_rows(tensor: Tensor) -> Tensor:
    """Return a view of the rows of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_row_range(tensor: Tensor) -> slice:
    """Return the indices of the rows that this process holds."""
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor))
    begin = -(-len(tensor) // tensor.device_mesh.size()) * tensor.device_mesh.get_local_rank()
    return slice(begin, begin + len(local_rows(tensor)))
