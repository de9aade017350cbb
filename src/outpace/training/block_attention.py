"""Attention of draft blocks: each block attends to the text before it, and to itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.attention.ranges import HullAttention
from outpace.models.attention import Attend
from outpace.models.config import AttentionWindow, ModelConfig
from outpace.training.layer_attention import narrow_ranges, plan_layer_attention

MAX_ROWS_PER_CALL = 512
"""Maximum rows per attention call, unless a block is longer."""


def stack_attention(text: Attend, blocks: Attend, count: int) -> Attend:
    """Combine attention of `count` text rows over text with that of block rows over all rows."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        own = text(layer, q[:count], k[:count], v[:count], sinks)
        return torch.cat((own, blocks(layer, q[count:], k, v, sinks)))

    return attend


def split_ranges(ranges: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """Split packed ranges into those of context rows over context, and of block rows over both.

    The keys of the latter are all context rows followed by all block rows, the order in which the
    draft passes them to its attention. `block bool[T]` marks the block rows.
    """
    before = F.pad(block.cumsum(0), (1, 0))
    context = torch.arange(len(ranges) + 1) - before
    inner, outer = ranges[~block].long(), ranges[block].long()
    own = context[-1] + before[outer[:, 1]]
    return context[inner].int(), torch.stack((context[outer[:, 0]], own), 1).int()


def block_attention(
    config: ModelConfig, ranges: Tensor, context: int, device: torch.device
) -> Attend:
    """Plan the attention of block rows over `context` rows and themselves, per layer."""
    block = config.block or 1
    most = max(MAX_ROWS_PER_CALL - MAX_ROWS_PER_CALL % block, block)
    _, counts = torch.unique_consecutive(ranges[:, 0, 0], return_counts=True)
    runs = [min(most, rows - at) for rows in counts.tolist() for at in range(0, rows, most)]
    own = context + torch.arange(len(ranges))

    def plan(sight: AttentionWindow) -> Attend:
        return HullAttention(narrow_block_ranges(sight, ranges, own), runs, device)

    return plan_layer_attention(config, plan)


def narrow_block_ranges(sight: AttentionWindow, ranges: Tensor, own: Tensor) -> Tensor:
    """Narrow ranges of block rows to a layer's attention window.

    As in the published trainer, a window limits the context only; blocks are visible in full.
    """
    seen = narrow_ranges(sight, ranges, own)
    return torch.stack((seen[:, 0], torch.stack((ranges[:, 1, 0], seen[:, 1, 1]), 1)), 1)
