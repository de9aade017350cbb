"""Gradient checkpointing (Chen et al., 2016): less memory for a second forward pass."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from outpace.models.transformer import Stack


def recompute_blocks(model: Stack) -> None:
    """Make blocks save only their inputs and recompute activations in the backward pass."""
    for block in model.blocks:
        # Set on the instance, so that parameters keep their names.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
