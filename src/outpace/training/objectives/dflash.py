"""DFlash: trains a draft to fill masked blocks at random anchors, given its target's features.

Shapes: C context rows, R block rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn import functional as F

from outpace.attention.ranges import causal_ranges
from outpace.decoding.target import MASKED_DRAFT_KINDS
from outpace.models.attention import Attend
from outpace.models.config import ModelConfig
from outpace.models.draft import BlockDraft, DFlashFusedDraft, Draft
from outpace.models.transformer import Transformer
from outpace.training.block_attention import block_attention, split_ranges, stack_attention
from outpace.training.data import Example
from outpace.training.feature_spec import FeatureSpec
from outpace.training.field_types import Count, Fraction, TokenId, Weight, check_bounds
from outpace.training.layer_attention import plan_row_attention
from outpace.training.objective import (
    Loss,
    Models,
    Objective,
    score_in_chunks,
)
from outpace.training.rows import UNSCORED, Bools, Ints, Rows

GAMMAS = {0: 0.0, 8: 4.0, 10: 5.0, 16: 7.0}
"""Published decay constants by block size; interpolated between them."""


@dataclass(slots=True)
class DraftPasses:
    """Outputs of target and draft for packed rows.

    Attributes:
        block: `bool[T]`, whether a packed row is a block row.
        labels: `i64[R]`, labels of block rows.
        hidden: `[R, dim]`, the draft's hidden states.
        before: `i64[R]`, index of the context row that predicts the same slot.
        context: `[C, dim]`, the target's hidden states after the final norm; None unless its
            distributions are the targets.
    """

    block: Tensor
    labels: Tensor
    hidden: Tensor
    before: Tensor
    context: Tensor | None


@dataclass(frozen=True, kw_only=True)
class DFlash(Objective):
    """Train a draft to fill blocks as its target would (DFlash, Chen et al., 2026, section 4).

    The target runs over an example once. Blocks, each a response token followed by masks, are
    placed at random anchors; a block attends to the target's hidden states before its anchor, and
    to itself. A mask predicts the token at its slot. A draft that adds features also has the
    example as input. Tokens outside a draft's own vocabulary are not scored.

    Attributes:
        anchors: blocks per example, at new random anchors each time; fewer in short examples.
        fixed: adjacent blocks over the response instead of random anchors.
        gamma: decay constant in tokens of the weight of a mask; by block size unless given, 0
            for equal weights.
        dpace: weight each mask by the expected acceptance length instead (D-PACE), and normalise
            by examples, not by weights.
        alpha: D-PACE's smoothing of probabilities p, to (1 - alpha) p + alpha.
        divergence: use the KL divergence from the target's distribution instead of the
            cross-entropy of the token.
        features: whether the draft's context is hidden states; otherwise token embeddings.
        block: length of a block including its first token; set by the draft.
        mask_id: the mask token; set by the draft.
        length: maximum positions of the draft; set by it.
    """

    roles: ClassVar[tuple[str, ...]] = ("target",)
    method: ClassVar[str | None] = "dflash"

    anchors: Count = 512
    fixed: bool = False
    gamma: Weight | None = None
    dpace: bool = False
    alpha: Fraction = 0.5
    divergence: bool = False
    features: bool = True
    block: Count | None = None
    mask_id: TokenId | None = None
    length: Count | None = None

    def __post_init__(self) -> None:
        check_bounds(self)

    def bind(self, config: ModelConfig) -> Self:
        """Set block size, mask token and length; `ValueError` unless it is a masked draft."""
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
        if config.shift:
            raise ValueError(
                f"dflash trains no draft that predicts from its last token, as a "
                f"{config.architecture} (DSpark) does; give the configuration of a DFlash draft"
            )
        gamma = self.gamma
        if gamma is None:
            gamma = float(np.interp(config.block, [*GAMMAS], [*GAMMAS.values()]))
        return replace(
            self,
            gamma=gamma,
            block=config.block,
            mask_id=config.mask_id,
            length=config.max_length,
        )

    def rows(self, example: Example, rng: Generator) -> Rows:
        """Build context rows for the target, and block rows for the draft."""
        tokens = np.array([*example.prompt, *example.response])
        scored = np.arange(len(tokens)) >= len(example.prompt)
        places = np.flatnonzero(scored[:-1] & scored[1:])
        if self.fixed:
            return self.block_rows(tokens, scored, places[:: self.block])
        count = min(self.anchors, len(places))
        return self.block_rows(tokens, scored, np.sort(rng.choice(places, count, replace=False)))

    def block_rows(self, tokens: Ints, scored: Bools, anchors: Ints) -> Rows:
        """Build causal context rows, followed by one block of rows per anchor.

        `tokens i64[S]` are the example; `scored bool[S]` are those used as labels.
        """
        assert self.block and self.length and self.mask_id is not None, "bind the objective first"
        total, steps = len(tokens), np.arange(self.block)
        slots = anchors[:, None] + steps
        within = np.minimum(slots, total - 1)
        labelled = scored[within] & (slots < total) & (steps > 0)
        fall = np.exp(-(steps - 1) / self.gamma) if self.gamma else np.ones(self.block)
        weights = np.where(labelled, fall, 0.0)
        ranges = torch.zeros(*slots.shape, 2, 2, dtype=torch.int32)
        ranges[..., 0, 1] = torch.from_numpy(anchors)[:, None]
        ranges[..., 1, :] = torch.tensor([0, self.block]) + total
        ranges[..., 1, :] += torch.arange(len(anchors))[:, None, None] * self.block
        ids = np.where(steps > 0, self.mask_id, tokens[within])
        labels = np.where(labelled, tokens[within], UNSCORED)
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
        accepted = hits.view(-1, self.block or 1)[:, 1:].cumprod(1).sum(1) + 1
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
        """Return the loss, negative log-likelihood and top-1 correctness of each mask."""
        draft, target = models.trained, models.others["target"]
        assert isinstance(draft, Draft)
        labels = draft.head_labels(out.labels[masks])
        scores = draft.head_logits(out.hidden[masks]).float().log_softmax(-1)
        losses = surprise = -scores.gather(1, labels[:, None]).squeeze(1)
        if out.context is not None:
            with torch.no_grad():
                logits = target.compute_logits(out.context[out.before[masks]]).float()
                logits = logits if draft.head_tokens is None else logits[:, draft.head_tokens]
                targets = logits.log_softmax(-1)
            losses = F.kl_div(scores, targets, reduction="none", log_target=True).sum(-1)
        return losses, surprise, scores.argmax(-1) == labels

    def run_models(self, models: Models, rows: Rows) -> DraftPasses:
        """Run the target over context rows, and the draft over block rows."""
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
        features, context = self.target_features(draft, target, text)
        attend = block_attention(draft.config, ranges, len(places), positions.device)
        if isinstance(draft, DFlashFusedDraft):
            attend = stack_attention(
                plan_row_attention(draft.config, inner, positions.device), attend, len(places)
            )
            hidden = adding_draft_states(draft, text, features, rows.ids[block], positions, attend)
        else:
            hidden = draft(rows.ids[block], positions, attend, context=(features, places))
        before = ranges[:, 0, 0].to(positions) + positions - 1
        targets = context if self.divergence else None
        return DraftPasses(block, rows.labels[block], hidden, before, targets)

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

    @torch.no_grad()
    def target_features(
        self, draft: BlockDraft, target: Transformer, text: Rows
    ) -> tuple[Tensor, Tensor]:
        """Return the draft's features of the context rows, and the target's last states."""
        reading = FeatureSpec(draft.config.feature_layers, self.divergence)
        if self.features:
            return reading.read_states(target, text.ids, text.positions, text.ranges, text.features)
        tokens = target.embedding(text.ids)
        last = tokens
        if self.divergence:
            _, last = reading.read_states(target, text.ids, text.positions, text.ranges)
        return tokens.repeat(1, len(reading.layers)), last

    def feature_spec(self, config: ModelConfig) -> FeatureSpec | None:
        """Return the states of the draft's feature layers, if used, and of the target's head."""
        return FeatureSpec(config.feature_layers, self.divergence) if self.features else None


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
    """Return the number of items as a float tensor, the count of a metric."""
    return torch.tensor(float(len(items)), device=items.device)
