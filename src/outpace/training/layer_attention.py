"""Attention over packed rows in training, with the attention window of each layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.attention.ranges import (
    HullAttention,
    RangesAttention,
    causal_ranges,
    find_documents,
    narrow_to_window,
)
from outpace.models.attention import Attend
from outpace.models.config import AttentionWindow, ModelConfig
from outpace.models.draft import Draft
from outpace.models.gated_delta import RunRows, whole_sequences
from outpace.models.transformer import Transformer
from outpace.training.rows import Rows


def hidden_states(model: Transformer | Draft, rows: Rows) -> Tensor:
    """Return a model's hidden states of packed rows, `[T, dim]`."""
    attend = plan_row_attention(model.config, rows.ranges, rows.ids.device)
    hidden: Tensor = model(rows.ids, rows.positions, attend)
    return hidden


def plan_row_attention(config: ModelConfig, ranges: Tensor, device: torch.device) -> Attend:
    """Plan the attention of packed rows, once for all layers, and their recurrence if any."""
    own = torch.arange(len(ranges))
    attend = plan_layer_attention(
        config,
        lambda layer_window: RangesAttention(narrow_ranges(layer_window, ranges, own), device),
    )
    return attend if config.delta is None else RowRecurrence(attend, ranges, device)


class RowRecurrence:
    """Attention of packed rows, and a recurrent state of each document."""

    def __init__(self, attend: Attend, ranges: Tensor, device: torch.device) -> None:
        """Plan the documents of causal rows with `ranges i32[T, 2, 2]`."""
        documents = find_documents(ranges)
        wanted = torch.cat([causal_ranges(end - first) + first for first, end in documents])
        assert torch.equal(ranges[:, 0], wanted[:, 0]), "recurrent layers run causal rows"
        self.attend, self.device = attend, device
        self.documents = whole_sequences(documents)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        return self.attend(layer, q, k, v, sinks)

    def recur(self, layer: int, run: RunRows) -> Tensor:
        """Run each document from its first row, in float32 under autocast too."""
        with torch.autocast(self.device.type, enabled=False):
            return run(self.documents)[0]


def plan_layer_attention(config: ModelConfig, plan: Callable[[AttentionWindow], Attend]) -> Attend:
    """Plan one attention per distinct attention window; return a dispatcher by layer."""
    if not config.windows:
        return plan(AttentionWindow())
    plans = {layer_window: plan(layer_window) for layer_window in set(config.windows)}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return plans[config.windows[layer]](layer, q, k, v, sinks)

    return attend


def narrow_ranges(layer_window: AttentionWindow, ranges: Tensor, own: Tensor) -> Tensor:
    """Narrow ranges to a layer's attention window; `own i64[T]` are the rows' own keys."""
    return narrow_to_window(ranges, own, window=layer_window.window, causal=layer_window.causal)


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

    def plan(layer_window: AttentionWindow) -> Attend:
        return HullAttention(narrow_block_ranges(layer_window, ranges, own), runs, device)

    return plan_layer_attention(config, plan)


def narrow_block_ranges(layer_window: AttentionWindow, ranges: Tensor, own: Tensor) -> Tensor:
    """Narrow ranges of block rows to a layer's attention window."""
    # As in the published trainer, a window limits the context only; blocks are visible in full.
    visible = narrow_ranges(layer_window, ranges, own)
    return torch.stack((visible[:, 0], torch.stack((ranges[:, 1, 0], visible[:, 1, 1]), 1)), 1)
