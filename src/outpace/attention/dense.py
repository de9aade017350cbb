"""Attention over cached slots by PyTorch kernels, on any device: the reference back end.

Shapes: T rows of all sequences, H heads, K key/value heads, D head size, S cache slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.attention.batch import AttentionBatch, RowSpan
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


MAX_GROUPED_ROWS = 32
"""Maximum rows per sequence to share a call with neighbours; longer sequences fill a call alone."""

MAX_COPY_BYTES = 2**21
"""Maximum size of the float64 copy of keys and values for one call, so that it stays in a CPU
cache."""


class DenseAttention:
    """Plan the calls of a pass: one per group of equally spaced sequences, or one per sequence.

    With `double`, the result of a row is identical to the last bit of float32 whatever else a call
    contains.
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        heads: int,
        attention_windows: Sequence[AttentionWindow] = (),
        *,
        double: bool = False,
    ) -> None:
        self.keys, self.values = keys, values
        self.double = double
        self.like = keys[0].new_empty(0, dtype=torch.float64) if double else keys[0]
        self.heads_per_kv_head = heads // keys[0].shape[1]
        self.attention_windows = attention_windows or [AttentionWindow()] * len(keys)
        self.groups_sequences = keys[0].device.type == "cpu"

    @property
    def num_arrays(self) -> int:
        return 0

    def plan_arrays(self, spans: Sequence[RowSpan]) -> tuple[()]:
        return ()

    def plan_pass(self, batch: AttentionBatch) -> Attend:
        calls = {
            layer_window: self.plan_calls(batch.spans, layer_window)
            for layer_window in set(self.attention_windows)
        }

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
        ) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            if k.shape[1]:
                keys.index_copy_(0, batch.write_slots, k)
                values.index_copy_(0, batch.write_slots, v)
            own = calls[self.attention_windows[layer]]
            if len(own) == 1 and own[0].is_contiguous:
                return own[0](q, keys, values, sinks)
            out = torch.empty_like(q)
            for call in own:
                out[call.rows] = call(q, keys, values, sinks)
            return out

        if not self.double:
            return attend
        return lambda layer, q, k, v, sinks=None: attend(layer, q.double(), k, v, sinks).to(v.dtype)

    def plan_calls(
        self, spans: Sequence[RowSpan], layer_window: AttentionWindow
    ) -> list[SequenceCall | GroupCall]:
        singles: list[RowSpan] = []
        by_shape: dict[tuple[int, int], list[RowSpan]] = {}
        for span in spans:
            stride = span.pages.stride  # all of it is read, up to the longest visible length
            fits = stride and first_physical_slot(span) + stride <= len(self.keys[0])
            if self.groups_sequences and fits and len(span) <= MAX_GROUPED_ROWS:
                by_shape.setdefault((len(span), stride), []).append(span)
            else:
                singles.append(span)
        calls: list[SequenceCall | GroupCall] = []
        for (_, stride), group in by_shape.items():
            neighbour_groups, isolated = group_neighbours(group, stride)
            singles += isolated
            calls += [
                GroupCall.from_spans(part, stride, layer_window, self.like, self.heads_per_kv_head)
                for members in neighbour_groups
                for part in self.split_group(members)
            ]
        return calls + [SequenceCall.from_span(span, layer_window, self.like) for span in singles]

    def split_group(self, run: list[RowSpan]) -> list[list[RowSpan]]:
        if not self.double:
            return [run]
        slot = 2 * self.keys[0][0].numel() * self.like.element_size()
        size = slot * max(span.num_visible for span in run) * len(run)
        count = min(-(-size // MAX_COPY_BYTES), len(run))
        ends = [len(run) * part // count for part in range(count + 1)]
        return [run[begin:end] for begin, end in pairwise(ends)]


def group_neighbours(
    group: list[RowSpan], stride: int
) -> tuple[list[list[RowSpan]], list[RowSpan]]:
    group = sorted(group, key=first_physical_slot)
    runs: list[list[RowSpan]] = []
    for span in group:
        if runs and first_physical_slot(span) - first_physical_slot(runs[-1][-1]) <= 2 * stride:
            runs[-1].append(span)
        else:
            runs.append([span])
    return [run for run in runs if len(run) > 1], [run[0] for run in runs if len(run) == 1]


def first_physical_slot(span: RowSpan) -> int:
    assert span.pages.first is not None
    return span.pages.first


@dataclass(slots=True)
class SequenceCall:
    """Attention call for the rows of one sequence."""

    rows: slice
    """Range of the rows in the batch."""
    slots: slice | Tensor
    """Physical slots of the sequence, up to the last visible one."""
    bias: Tensor | None = None
    """`[n, slots]`, added to the scores; None if all rows see all slots, or are causal."""
    causal: bool = False
    """Whether the rows are the first of the sequence and see themselves and the rows before them.
    Whether the rows are the first of the sequence and see themselves and the rows before them."""

    @classmethod
    def from_span(cls, span: RowSpan, layer_window: AttentionWindow, like: Tensor) -> SequenceCall:
        window = span.pages.physical_slots(span.num_visible)
        slots = window if isinstance(window, slice) else torch.from_numpy(window).to(like.device)
        stops = span.row_visible_ends
        if layer_window == AttentionWindow() and span.tree is None:
            if stops[0] == span.num_visible:
                return cls(span.rows, slots)
            if span.visible_ends is None and span.start == 0:
                return cls(span.rows, slots, causal=True)
        return cls(
            span.rows, slots, mask_bias(visibility_mask(span, span.num_visible, layer_window), like)
        )

    @property
    def is_contiguous(self) -> bool:
        return True

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with all rows."""
        # For a single row, the query heads of a key/value head become rows of one product.
        k, v = match_queries(q, keys[None, self.slots], values[None, self.slots])
        rows = q[self.rows]
        n, heads, size = rows.shape
        if n == 1:
            grouped = rows.view(1, k.shape[1], -1, size)
            own = group_sinks(sinks, k.shape[1], 1)
            return sink_attention(grouped, k, v, self.bias, sinks=own).view(1, heads, size)
        own = None if sinks is None else sinks.view(1, -1, 1, 1)
        queries = rows[None].transpose(1, 2)
        output = sink_attention(queries, k, v, self.bias, causal=self.causal, sinks=own)
        return output.transpose(1, 2)[0]


@dataclass(slots=True)
class GroupCall:
    """One attention call for sequences of n rows each, stored whole strides apart."""

    # Their keys form one strided view of the cache, without a copy. The view may cover places
    # without a sequence; their results are discarded.

    rows: slice | Tensor
    """Rows in the batch, sequence by sequence, `i64[B * n]`; a slice if contiguous."""
    places: Tensor | None
    """Place of each sequence among the J places of the view, `i64[B]`; None if all are used."""
    shape: tuple[int, int, int]
    """J, n, and the visible slots per place."""
    first: int
    """Physical slot at which the view begins."""
    stride: int
    """Slots between places."""
    bias: Tensor | None
    """`[J, 1, n * H / K, slots]` or broadcastable to it; None if all rows see all slots."""

    @classmethod
    def from_spans(
        cls,
        spans: list[RowSpan],
        stride: int,
        layer_window: AttentionWindow,
        like: Tensor,
        sharing: int,
    ) -> GroupCall:
        """Create the call of sequences in memory order; `sharing` heads share a key/value head."""
        first, rows = first_physical_slot(spans[0]), len(spans[0])
        places = [(first_physical_slot(span) - first) // stride for span in spans]
        count, seen = places[-1] + 1, max(span.num_visible for span in spans)
        order = [row for span in spans for row in range(span.rows.start, span.rows.stop)]
        whole = range(order[0], order[0] + len(order))
        return cls(
            rows=slice(whole.start, whole.stop) if order == [*whole] else torch.tensor(order),
            places=None if count == len(places) else torch.tensor(places),
            shape=(count, rows, seen),
            first=first,
            stride=stride,
            bias=group_bias(spans, places, (count, rows, seen), layer_window, like, sharing),
        )

    @property
    def is_contiguous(self) -> bool:
        """Whether the output rows are in batch order."""
        return isinstance(self.rows, slice)

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        count, n, seen = self.shape
        size, kv_heads = q.shape[-1], keys.shape[1]
        own = q[self.rows].view(-1, n, kv_heads, q.shape[1] // kv_heads, size)
        if self.places is not None:
            own = own.new_zeros(count, *own.shape[1:]).index_copy_(0, self.places, own)
        k, v = match_queries(q, self.view_places(keys), self.view_places(values))
        grouped = own.transpose(1, 2).reshape(count, kv_heads, -1, size)
        output = sink_attention(grouped, k, v, self.bias, sinks=group_sinks(sinks, kv_heads, n))
        output = output.view(count, kv_heads, n, -1, size).transpose(1, 2)
        return (output if self.places is None else output[self.places]).reshape(-1, *q.shape[1:])

    def view_places(self, x: Tensor) -> Tensor:
        """Return keys or values of all places, `[J, visible, K, D]`."""
        count, _, seen = self.shape
        strides = (self.stride * x.stride(0), *x.stride())
        begin = x.storage_offset() + self.first * x.stride(0)
        return x.as_strided((count, seen, *x.shape[1:]), strides, begin)


def group_sinks(sinks: Tensor | None, kv_heads: int, rows: int) -> Tensor | None:
    """Expand sinks `[H]` to `[1, K, n, 1]`, for rows whose heads are grouped by key/value head."""
    if sinks is None:
        return None
    return sinks.view(kv_heads, 1, -1).repeat(1, rows, 1).view(1, kv_heads, -1, 1)


def match_queries(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values `[B, slots, K, D]` as `[B, K, slots, D]`, in the dtype of `q`."""
    if q.dtype != keys.dtype:
        keys, values = keys.to(q.dtype), values.to(q.dtype)
    return keys.transpose(1, 2), values.transpose(1, 2)


def group_bias(
    spans: Sequence[RowSpan],
    places: Sequence[int],
    shape: tuple[int, int, int],
    layer_window: AttentionWindow,
    like: Tensor,
    sharing: int,
) -> Tensor | None:
    """Return the bias of sequences at some of J places, or None if all rows see all slots."""
    count, rows, seen = shape
    if rows == 1 and layer_window == AttentionWindow() and not any(span.tree for span in spans):
        if all(span.num_visible == seen for span in spans):
            return None
        ends = np.full(count, seen)
        ends[places] = [span.num_visible for span in spans]
        return mask_bias((np.arange(seen) < ends[:, None])[:, None, None], like)
    mask = np.ones((count, rows, seen), dtype=bool)
    for place, span in zip(places, spans, strict=True):
        mask[place] = visibility_mask(span, seen, layer_window)
    return mask_bias(mask.repeat(sharing, 1)[:, None], like)


def mask_bias(mask: np.ndarray, like: Tensor) -> Tensor:
    hidden = torch.from_numpy(~mask).to(like.device)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(
        hidden, -torch.inf
    )
