"""Frozen targets of drafts, multiplied in the format in which they decode."""

from __future__ import annotations

import torch
from torch import nn

from outpace.checkpoints.load import load_model
from outpace.models.draft import Draft
from outpace.models.packed import DenseState
from outpace.models.transformer import Embedding, Transformer


def load_target(name: str, dtype: torch.dtype, quantize: str | None) -> Transformer:
    """Load a target, with matrices of 4 to 8 bits as `load_model` has them under `quantize`."""
    return load_model(name, dtype=dtype, quantize=quantize, plain=quantize is None)


def make_borrowed_head_dense(draft: Draft, target: Transformer) -> None:
    """Replace the quantized head of a target, in place, by a dense one if a draft borrows it.

    Compiled products have no gradient, and the loss of such a draft is computed by this head.
    """
    if draft.unembedding is not None:
        return
    head = target.embedding if target.unembedding is None else target.unembedding
    if not isinstance(head, DenseState):
        return
    weight = nn.Parameter(head.dense_weight().to(target.norm.weight.dtype), requires_grad=False)
    outputs, inputs = weight.shape
    if target.unembedding is None:
        target.embedding = Embedding(outputs, inputs, _weight=weight)
    else:
        target.unembedding = nn.Linear(inputs, outputs, bias=False, device="meta")
        target.unembedding.weight = weight
