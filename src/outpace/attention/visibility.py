"""Masks of the slots that rows see."""

from __future__ import annotations

import numpy as np

from outpace.attention.batch import RowSpan
from outpace.decoding.tree import MAX_TREE_SLOTS, Tree
from outpace.models.config import AttentionWindow


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
    """Add the ancestors of tree rows to `mask [n, seen]`, which holds the committed prefix.

    An attention window is counted along the slots a row sees, because these are its text.
    """
    mask |= np.arange(mask.shape[1]) == own
    bits = np.array(tree.ancestor_masks, dtype=np.int64)[:, None]
    pointed = np.arange(min(MAX_TREE_SLOTS, mask.shape[1] - tree.root_slot))
    mask[-len(bits) :, tree.root_slot :][:, : len(pointed)] |= (bits >> pointed & 1).astype(bool)
    if layer_window.window is not None:
        mask &= mask[:, ::-1].cumsum(1)[:, ::-1] <= layer_window.window
    return mask
