"""Attention over cached slots by PyTorch kernels, on any device: the reference back end.

Shapes: T rows of all sequences, H heads, K key/value heads, D head size, S cache slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.attention.batch import AttentionBatch, RowSpan
from outpace.attention.cached import read_rows, write_rows
from outpace.decoding.tree import MAX_TREE_SLOTS, Tree
from outpace.models.attention import Attend
from outpace.models.config import AttentionWindow

MAX_SCORES = 2**26
"""Maximum number of scores in memory at a time; at least one row is processed."""


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with `q [B, H, n, D]` over `k, v [B, K, S, D]`, with optional sinks.

    Args:
        q: queries, `[B, H, n, D]`.
        k: keys, `[B, K, S, D]`.
        v: values, `[B, K, S, D]`.
        mask: `[..., n, S]`, added to the scores, or boolean: True where a key is visible.
        causal: whether to apply a causal mask.
        sinks: additional scores of the softmax, `[1, H, n or 1, 1]`. PyTorch has no kernel for
            them.

    Returns:
        `[B, H, n, D]`.
    """
    shared = q.shape[1] // k.shape[1]
    if sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shared > 1
        )
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=q.device).masked_fill_(~mask, -torch.inf)
    if shared > 1:
        k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    sinks = sinks.expand(*q.shape[:3], 1)
    # Unlike PyTorch's kernel, this one holds all scores: a part of the rows at a time.
    block = max(MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]), 1)
    parts = []
    for first in range(0, q.shape[2], block):
        rows = slice(first, first + block)
        own = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
        parts.append(attention_weights(q[:, :, rows], k, own, sinks[:, :, rows]) @ v)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, sinks: Tensor) -> Tensor:
    """Return the weight of each key, `[B, H, n, S]`, without those of the sinks."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask
    every = torch.cat((scores, sinks.to(scores.dtype)), -1)
    return every.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))[..., :-1].to(
        q.dtype
    )


def visibility_mask(span: RowSpan, seen: int, layer_window: AttentionWindow) -> np.ndarray:
    """Return which of the first slots each row sees in layers of one window, `bool[n, seen]`."""
    slots = np.arange(seen)
    mask = slots < np.asarray(span.row_visible_ends)[:, None]
    own = np.arange(span.start, span.start + len(span))[:, None]
    if span.tree is not None:
        return tree_mask(mask, own, span.tree, layer_window)
    if layer_window.causal:
        mask &= slots <= own
    if layer_window.window is not None:
        mask &= slots > own - layer_window.window
    return mask


def tree_mask(
    mask: np.ndarray, own: np.ndarray, tree: Tree, layer_window: AttentionWindow
) -> np.ndarray:
    """Add the ancestors of tree rows to `mask [n, seen]`, which holds the committed prefix."""
    # An attention window is counted along the slots a row sees, because these are its text.
    mask |= np.arange(mask.shape[1]) == own
    bits = np.array(tree.ancestor_masks, dtype=np.int64)[:, None]
    pointed = np.arange(min(MAX_TREE_SLOTS, mask.shape[1] - tree.root_slot))
    mask[-len(bits) :, tree.root_slot :][:, : len(pointed)] |= (bits >> pointed & 1).astype(bool)
    if layer_window.window is not None:
        mask &= mask[:, ::-1].cumsum(1)[:, ::-1] <= layer_window.window
    return mask


class DenseAttention:
    """Attend with one call per sequence over a copy of its keys and values.

    `keys` and `values` are `[S, K, D]` per layer, and `heads` is the number of query heads.
    `dtype` is that of queries and results, by default that of the keys. With `double`, the result
    of a row is identical to the last bit of float32 whatever else a call contains.
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        heads: int,
        attention_windows: Sequence[AttentionWindow] = (),
        *,
        dtype: torch.dtype | None = None,
        double: bool = False,
    ) -> None:
        self.keys, self.values = keys, values
        self.dtype = dtype or keys[0].dtype
        self.like = keys[0].new_empty(0, dtype=torch.float64 if double else self.dtype)
        self.heads_per_kv_head = heads // keys[0].shape[1]
        self.attention_windows = attention_windows or [AttentionWindow()] * len(keys)

    @property
    def num_arrays(self) -> int:
        return 0

    def plan_arrays(self, spans: Sequence[RowSpan]) -> tuple[()]:
        return ()

    def plan_pass(self, batch: AttentionBatch) -> Attend:
        calls = {
            window: [SequenceCall.from_span(span, window, self.like) for span in batch.spans]
            for window in set(self.attention_windows)
        }

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
        ) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            if k.shape[1]:
                write_rows(keys, batch.write_slots, k)
                write_rows(values, batch.write_slots, v)
            own, exact = calls[self.attention_windows[layer]], q.to(self.like.dtype)
            if len(own) == 1:
                return own[0](exact, keys, values, sinks).to(q.dtype)
            out = torch.empty_like(q)
            for call in own:
                out[call.rows] = call(exact, keys, values, sinks)
            return out

        return attend


@dataclass(slots=True)
class SequenceCall:
    """Attention call for the rows of one sequence."""

    rows: slice
    """Range of the rows in the batch."""
    slots: Tensor
    """Physical slots of the sequence, up to the last visible one."""
    bias: Tensor | None = None
    """`[n, slots]`, added to the scores; None if all rows see all slots, or are causal."""
    causal: bool = False
    """Whether the rows are the first of the sequence, and causal."""

    @classmethod
    def from_span(cls, span: RowSpan, layer_window: AttentionWindow, like: Tensor) -> SequenceCall:
        slots = torch.from_numpy(span.pages.slots[: span.num_visible]).to(like.device)
        stops = span.row_visible_ends
        if layer_window == AttentionWindow() and span.tree is None:
            if stops[0] == span.num_visible:
                return cls(span.rows, slots)
            if span.visible_ends is None and span.start == 0:
                return cls(span.rows, slots, causal=True)
        return cls(
            span.rows, slots, mask_bias(visibility_mask(span, span.num_visible, layer_window), like)
        )

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with all rows."""
        # For a single row, the query heads of a key/value head become rows of one product.
        k, v = (
            read_rows(each, self.slots, q.dtype)[None].transpose(1, 2) for each in (keys, values)
        )
        rows = q[self.rows]
        n, heads, size = rows.shape
        if n == 1:
            grouped = rows.view(1, k.shape[1], -1, size)
            own = None if sinks is None else sinks.view(1, k.shape[1], -1, 1)
            return sink_attention(grouped, k, v, self.bias, sinks=own).view(1, heads, size)
        own = None if sinks is None else sinks.view(1, -1, 1, 1)
        queries = rows[None].transpose(1, 2)
        output = sink_attention(queries, k, v, self.bias, causal=self.causal, sinks=own)
        return output.transpose(1, 2)[0]


def mask_bias(mask: np.ndarray, like: Tensor) -> Tensor:
    hidden = torch.from_numpy(~mask).to(like.device)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(
        hidden, -torch.inf
    )
