"""Distributions of a draft and its target over the draft's vocabulary, and losses of both.

Shapes: R rows, D tokens of the draft's head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.models.draft import ChainedDraft, Draft
from outpace.models.dspark import DSparkDraft
from outpace.models.transformer import Transformer


def draft_scores(draft: Draft, hidden: Tensor, previous: Tensor) -> Tensor:
    """Return a draft's log-probabilities `f32[R, D]` from its hidden states `[R, dim]`.

    `previous i64[R]` are the tokens before the slots that the rows predict.
    """
    logits = draft.head_logits(hidden)
    if isinstance(draft, ChainedDraft):
        logits = draft.condition_logits(hidden, logits, previous)
    return logits.float().log_softmax(-1)


@torch.no_grad()
def target_scores(draft: Draft, target: Transformer, hidden: Tensor) -> Tensor:
    """Return the target's log-probabilities `f32[R, D]` from its hidden states `[R, dim]`."""
    logits = target.compute_logits(hidden).float()
    logits = logits if draft.head_tokens is None else logits[:, draft.head_tokens]
    return logits.log_softmax(-1)


def score_distance(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the L1 distance `f32[R]` between distributions, twice their total variation."""
    return (scores.exp() - targets.exp()).abs().sum(-1)


def confidence_loss(draft: Draft, hidden: Tensor, previous: Tensor, distance: Tensor) -> Tensor:
    """Return the cross-entropy `f32[R]` of a confidence head and the draft's acceptance rate.

    The rate is the probability that speculative sampling accepts a token drawn from the draft's
    distribution, which is at `distance f32[R]` from the target's.
    """
    assert isinstance(draft, DSparkDraft)
    rate = (1 - distance.detach() / 2).clamp(0, 1)
    logits = draft.acceptance_logits(hidden, previous)
    return F.binary_cross_entropy_with_logits(logits, rate, reduction="none")
