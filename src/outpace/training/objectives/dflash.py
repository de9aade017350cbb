"""DFlash: trains a draft to fill masked blocks at random anchors, given its target's features.

Shapes: C context rows, R block rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Self

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn import functional as F

from outpace.attention.ranges import causal_ranges
from outpace.decoding.target import MASKED_DRAFT_KINDS
from outpace.field_types import Bounds, Count, Fraction, TokenId, Weight
from outpace.models.attention import Attend
from outpace.models.config import ModelConfig
from outpace.models.draft import BlockDraft, ChainedDraft, DFlashFusedDraft, Draft, DSparkDraft
from outpace.models.transformer import Transformer
from outpace.training.data import Example
from outpace.training.layer_attention import (
    block_attention,
    plan_row_attention,
    split_ranges,
    stack_attention,
)
from outpace.training.objective import FeatureSpec, Loss, Models, Objective, score_in_chunks
from outpace.training.rows import UNSCORED, Bools, Ints, Rows


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


def confidence_loss(draft: Draft, hidden: Tensor, previous: Tensor, distance: Tensor) -> Tensor:
    """Return the cross-entropy `f32[R]` of a confidence head and the draft's acceptance rate.

    The rate is the probability that speculative sampling accepts a token drawn from the draft's
    distribution, which is at `distance f32[R]` from the target's.
    """
    assert isinstance(draft, DSparkDraft)
    rate = (1 - distance.detach() / 2).clamp(0, 1)
    logits = draft.acceptance_logits(hidden, previous)
    return F.binary_cross_entropy_with_logits(logits, rate, reduction="none")


GAMMAS = {0: 0.0, 8: 4.0, 10: 5.0, 16: 7.0}
"""Published decay constants by block size, with all predicted slots; interpolated between them."""

TOTAL_VARIATION = 0.9
"""Published share of the distance between distributions, for drafts with heads."""


@dataclass(slots=True)
class DraftPasses:
    """Outputs of target and draft for packed rows."""

    block: Tensor
    """`bool[T]`, whether a packed row is a block row."""
    labels: Tensor
    """`i64[R]`, labels of block rows."""
    hidden: Tensor
    """`[R, dim]`, the draft's hidden states."""
    before: Tensor
    """`i64[R]`, index of the context row that predicts the same slot."""
    previous: Tensor
    """`i64[C]`, tokens of the context rows; the one before a slot is that of the row that predicts
    it."""
    context: Tensor | None
    """`[C, dim]`, the target's hidden states after the final norm; None unless its distributions
    are the targets."""


@dataclass(frozen=True, kw_only=True)
class DFlash(Objective):
    """Train a draft to fill blocks as its target would (DFlash, Chen et al., 2026, section 4).

    The target runs over an example once. Blocks, each a response token followed by masks, are
    placed at random anchors; a block attends to the target's hidden states before its anchor, and
    to itself. A mask predicts the token at its slot. A draft that adds features also has the
    example as input. Tokens outside a draft's own vocabulary are not scored.

    A draft with heads (DSpark, DeepSeek-AI, 2026, section 3.3) predicts from the token of its block
    on. Its Markov head reads the true token before each slot. Its confidence head predicts the
    acceptance rate of the draft, from the distance of both distributions.
    """

    roles: ClassVar[tuple[str, ...]] = ("target",)
    method: ClassVar[str | None] = "dflash"

    anchors: Count = 512
    """Blocks per example, at new random anchors each time; fewer in short examples."""
    fixed: bool = False
    """Adjacent blocks over the response instead of random anchors."""
    shortest: Count | None = None
    """Least length of a block, which is then random; all have the draft's by default."""
    gamma: Weight | None = None
    """Decay constant in tokens of the weight of a mask; by block size unless given, 0 for equal
    weights."""
    dpace: bool = False
    """Weight each mask by the expected acceptance length instead (D-PACE), and normalise by
    examples, not by weights."""
    alpha: Fraction = 0.5
    """D-PACE's smoothing of probabilities p, to (1 - alpha) p + alpha."""
    divergence: bool = False
    """Use the KL divergence from the target's distribution instead of the cross-entropy of the
    token."""
    total_variation: Fraction | None = None
    """Share of the L1 distance from the target's distribution in the loss, in place of the
    cross-entropy; 0.9 for a draft with heads, 0 for others."""
    confidence: Weight | None = None
    """Weight of the cross-entropy of the confidence head; 1 for a draft with one."""
    block: Count | None = None
    """Length of a block including its first token; set by the draft."""
    mask_id: TokenId | None = None
    """The mask token; set by the draft."""
    length: Count | None = None
    """Maximum positions of the draft; set by it."""
    shift: Annotated[int, Bounds(0, 1)] | None = None
    """1 if row p - 1 predicts slot p, 0 if row p does; set by the draft."""

    def bind(self, config: ModelConfig) -> Self:
        """Set what depends on the draft; `ValueError` unless it is a masked draft."""
        if config.kind not in MASKED_DRAFT_KINDS or config.block is None:
            raise ValueError(
                f"dflash needs a draft that fills blocks, and {config.architecture} is not one; "
                "give [model] a target and the configuration of such a draft"
            )
        if config.convolution is not None:
            raise ValueError(
                f"dflash trains no draft with convolutions, as a {config.architecture} has; give "
                "the configuration of a DFlash draft"
            )
        if self.shortest is not None and not 2 <= self.shortest <= config.block:
            raise ValueError(
                f"shortest must be from 2 to the draft's block of {config.block}, got "
                f"{self.shortest}"
            )
        gamma, share = self.gamma, self.total_variation
        if gamma is None:
            slots = config.block + config.shift
            gamma = float(np.interp(slots, [*GAMMAS], [*GAMMAS.values()]))
        return replace(
            self,
            gamma=gamma,
            total_variation=TOTAL_VARIATION * bool(config.chain) if share is None else share,
            confidence=self.confidence_weight(config),
            block=config.block,
            mask_id=config.mask_id,
            length=config.max_length,
            shift=config.shift,
        )

    def confidence_weight(self, config: ModelConfig) -> float:
        has_head = config.chain is not None and config.chain.predicts_acceptance
        weight = float(has_head) if self.confidence is None else self.confidence
        if weight and not has_head:
            raise ValueError(
                f"confidence {weight} needs a draft with a confidence head, and this "
                f"{config.architecture} has none; remove it"
            )
        if has_head and not weight:
            raise ValueError(
                "confidence 0 would leave the confidence head untrained; give a weight above 0, or "
                "a draft with enable_confidence_head = false"
            )
        return weight

    @property
    def reads_target(self) -> bool:
        return self.divergence or bool(self.total_variation) or bool(self.confidence)

    def rows(self, example: Example, rng: Generator) -> Rows:
        """Build context rows for the target, and block rows for the draft."""
        tokens = np.array([*example.prompt, *example.response])
        scored = np.arange(len(tokens)) >= len(example.prompt)
        places = np.flatnonzero(scored[:-1] & scored[1:])
        assert self.block, "bind the objective first"
        if self.fixed:
            anchors = places[:: self.block]
        else:
            count = min(self.anchors, len(places))
            anchors = np.sort(rng.choice(places, count, replace=False))
        if self.shortest is None:
            return self.block_rows(tokens, scored, anchors)
        lengths = rng.integers(self.shortest, self.block + 1, len(anchors))
        return self.block_rows(tokens, scored, anchors, lengths)

    def block_rows(
        self, tokens: Ints, scored: Bools, anchors: Ints, lengths: Ints | None = None
    ) -> Rows:
        """Build causal context rows, followed by one block of rows per anchor.

        `tokens i64[S]` are the example; `scored bool[S]` are those used as labels. Rows after the
        length of their block are neither scored nor visible.
        """
        assert self.block and self.length and self.mask_id is not None, "bind the objective first"
        assert self.shift is not None
        total, steps = len(tokens), np.arange(self.block)
        slots, order = anchors[:, None] + steps, steps + self.shift
        ends = np.full((len(anchors), 1), self.block) if lengths is None else lengths[:, None]
        predicted = np.minimum(slots + self.shift, total - 1)
        labelled = scored[predicted] & (slots + self.shift < total) & (order > 0) & (steps < ends)
        fall = np.exp(-(order - 1) / self.gamma) if self.gamma else np.ones(self.block)
        weights = np.where(labelled, fall, 0.0)
        ranges = torch.zeros(*slots.shape, 2, 2, dtype=torch.int32)
        ranges[..., 0, 1] = torch.from_numpy(anchors)[:, None]
        ranges[..., 1, 0], ranges[..., 1, 1] = total, torch.from_numpy(total + ends)
        ranges[..., 1, :] += torch.arange(len(anchors))[:, None, None] * self.block
        ids = np.where(steps > 0, self.mask_id, tokens[anchors][:, None])
        labels = np.where(labelled, tokens[predicted], UNSCORED)
        return Rows(
            ids=torch.from_numpy(np.append(tokens, ids)),
            # A block may exceed the draft's maximum length; its rows there are not scored.
            positions=torch.from_numpy(
                np.append(np.arange(total), np.minimum(slots, self.length - 1))
            ),
            ranges=torch.cat((causal_ranges(total), ranges.flatten(0, 1))),
            labels=torch.from_numpy(np.append(np.full(total, UNSCORED), labels)),
            weights=torch.from_numpy(np.append(np.zeros(total), weights).astype(np.float32)),
            normaliser=1.0 if self.dpace else float(weights.sum()),
        )

    def loss(self, models: Models, rows: Rows) -> Loss:
        """Run target and draft once each, and compute the weighted loss of all masks."""
        out = self.run_models(models, rows)
        draft = models.trained
        assert isinstance(draft, Draft)
        # Tokens that the draft's head does not cover have no loss; they count as rejected.
        scored = torch.nonzero(out.labels != UNSCORED).squeeze(1)
        covered = draft.head_labels(out.labels[scored]) >= 0
        masks = scored[covered]
        score = partial(self.score_masks, models, out)
        size = draft.config.draft_vocab or draft.config.vocab
        losses, surprise, right = score_in_chunks(score, masks, size)
        weights = rows.weights[out.block]
        if self.dpace:
            every = surprise.new_full((len(scored),), torch.inf)
            every[covered] = surprise.detach()
            weights = self.dpace_weights(every, scored, len(out.labels))
        hits = torch.zeros_like(out.labels)
        hits[masks] = right.long()
        assert self.shift is not None
        # After a wrong draft all are rejected, so the true tokens before a slot are those drafted.
        accepted = hits.view(-1, self.block or 1)[:, 1 - self.shift :].cumprod(1).sum(1) + 1
        return Loss(
            (losses * weights[masks]).sum(),
            {
                "accuracy": (hits.sum().float(), count_tensor(scored)),
                "accepted": (accepted.sum().float(), count_tensor(accepted)),
            },
        )

    def score_masks(
        self, models: Models, out: DraftPasses, masks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        draft, target = models.trained, models.others["target"]
        assert isinstance(draft, Draft)
        labels = draft.head_labels(out.labels[masks])
        hidden, previous = out.hidden[masks], out.previous[out.before[masks]]
        scores = draft_scores(draft, hidden, previous)
        losses = surprise = -scores.gather(1, labels[:, None]).squeeze(1)
        if out.context is not None:
            targets = target_scores(draft, target, out.context[out.before[masks]])
            if self.divergence:
                losses = F.kl_div(scores, targets, reduction="none", log_target=True).sum(-1)
            if self.total_variation or self.confidence:
                distance = (scores.exp() - targets.exp()).abs().sum(-1)  # twice the total variation
                share = self.total_variation or 0.0
                losses = (1 - share) * losses + share * distance
                if self.confidence:
                    errors = confidence_loss(draft, hidden, previous, distance)
                    losses = losses + self.confidence * errors
        return losses, surprise, scores.argmax(-1) == labels

    def run_models(self, models: Models, rows: Rows) -> DraftPasses:
        draft, target = models.trained, models.others["target"]
        assert isinstance(draft, BlockDraft)
        # Only block rows have a second range.
        block = rows.ranges[:, 1, 1] > rows.ranges[:, 1, 0]
        if not block.any():
            raise ValueError(
                "a block needs 2 consecutive response tokens, but no example of a batch has more "
                "than 1; give longer responses"
            )
        inner, ranges = split_ranges(rows.ranges, block)
        block = block.to(rows.ids.device)
        places, positions = rows.positions[~block], rows.positions[block]
        text = replace(rows, ids=rows.ids[~block], positions=places, ranges=inner)
        features, context = self.feature_spec(draft.config).read_states(
            target, text.ids, places, inner, text.features
        )
        attend = block_attention(draft.config, ranges, len(places), positions.device)
        if isinstance(draft, DFlashFusedDraft):
            attend = stack_attention(
                plan_row_attention(draft.config, inner, positions.device), attend, len(places)
            )
            hidden = adding_draft_states(draft, text, features, rows.ids[block], positions, attend)
        else:
            hidden = draft(rows.ids[block], positions, attend, context=(features, places))
        before = ranges[:, 0, 0].to(positions) + positions - 1 + draft.config.shift
        targets = context if self.reads_target else None
        return DraftPasses(block, rows.labels[block], hidden, before, text.ids, targets)

    def dpace_weights(self, surprise: Tensor, masks: Tensor, rows: int) -> Tensor:
        """Compute D-PACE's weights `f32[rows]`, from the expected acceptance length.

        `surprise` are the negative log-probabilities of the scored rows, `masks` their indices.
        """
        chance = surprise.new_ones(rows)
        chance[masks] = (1 - self.alpha) * torch.exp(-surprise) + self.alpha
        scored = torch.zeros_like(chance)
        scored[masks] = 1.0
        chance, scored = chance.view(-1, self.block or 1), scored.view(-1, self.block or 1)
        alive = chance.cumprod(1) * scored
        return (alive.flip(1).cumsum(1).flip(1) * scored).flatten()

    def feature_spec(self, config: ModelConfig) -> FeatureSpec:
        """Return the states of the draft's feature layers, and of the target's head if read."""
        return FeatureSpec(config.feature_layers, self.reads_target)


def adding_draft_states(
    draft: DFlashFusedDraft,
    text: Rows,
    features: Tensor,
    ids: Tensor,
    positions: Tensor,
    attend: Attend,
) -> Tensor:
    """Return hidden states `[R, dim]` of block rows `ids i64[R]`, after C text rows.

    Text rows have `features [C, f]`; block rows have zeros.
    """
    all_ids = torch.cat((text.ids, ids))
    wanted = torch.arange(len(text.ids), len(all_ids), device=all_ids.device)
    padded = F.pad(features, (0, 0, 0, len(ids)))
    places = torch.cat((text.positions, positions))
    return draft.capture_layers(all_ids, places, attend, wanted=wanted, features=[padded])[0]


def count_tensor(items: Tensor) -> Tensor:
    return torch.tensor(float(len(items)), device=items.device)
