"""Gradient checkpointing (Chen et al., 2016): less memory, for a forward pass done twice."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from outpace.models.transformer import Stack


def recompute(model: Stack) -> None:
    """Let the blocks of a model keep their inputs only; the backward pass makes the rest again."""
    for block in model.blocks:
        # On the instance, so that parameters keep their names.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
