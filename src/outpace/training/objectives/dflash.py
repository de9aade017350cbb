"""DFlash: blocks of masks at random anchors, each of which sees what its target read before it.

Shapes: C rows of context, R rows of blocks.
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

from outpace.attention.ranges import HullAttention, causal
from outpace.decoding.target import MASKED_DRAFT_KINDS
from outpace.models.config import ModelConfig, Sight
from outpace.models.draft import AddingDraft, BlockDraft
from outpace.models.transformer import Attend, Transformer
from outpace.training.data import Example
from outpace.training.kinds import Count, Share, TokenId, Weight, check_bounds
from outpace.training.objective import (
    Loss,
    Models,
    Objective,
    by_parts,
)
from outpace.training.reading import Reading
from outpace.training.rows import UNSCORED, Bools, Ints, Rows
from outpace.training.sights import by_layer, over_rows, through

GAMMAS = {0: 0.0, 8: 4.0, 10: 5.0, 16: 7.0}
"""Published decays by block size; those between are interpolated."""

RUN = 512
"""Rows of one call of attention at most, unless a block is longer."""


@dataclass(slots=True)
class Passes:
    """What target and draft made of packed rows.

    Attributes:
        block: `bool[T]`, which of them are rows of blocks.
        labels: `i64[R]`, what they learn.
        hidden: `[R, dim]` of the draft.
        before: `i64[R]`, the row of the context before each, which predicts it.
        context: `[C, dim]` of the target over the context, after the final norm; None where its
            distributions are not learnt.
    """

    block: Tensor
    labels: Tensor
    hidden: Tensor
    before: Tensor
    context: Tensor | None


@dataclass(frozen=True, kw_only=True)
class DFlash(Objective):
    """Train a draft to fill blocks as its target would (DFlash, Chen et al., 2026, section 4).

    The target reads an example once; then blocks, each a response token and masks, are laid at
    random anchors. A block sees the target's hidden states before its anchor, and itself. A mask
    is scored on the token of its own slot. A draft that adds features is fed the example as well.

    Attributes:
        anchors: blocks of an example, drawn anew each time; fewer where it is shorter.
        fixed: blocks side by side over the response, instead of at random anchors.
        gamma: tokens over which the weight of a mask falls to a third; by block size unless
            given, 0 for equal weights.
        dpace: weigh each mask by how far the draft gets with it instead (D-PACE), and divide by
            examples, not by weights.
        alpha: share of certainty that D-PACE adds to each probability.
        divergence: score the divergence from the target's distribution instead of the token.
        features: whether the draft sees hidden states; else the embeddings of the same tokens.
        block: length of a block, its first token included; taken from the draft.
        mask_id: the token of a mask; taken from the draft.
        length: positions that the draft knows; taken from it.
    """

    roles: ClassVar[tuple[str, ...]] = ("target",)
    method: ClassVar[str | None] = "dflash"

    anchors: Count = 512
    fixed: bool = False
    gamma: Weight | None = None
    dpace: bool = False
    alpha: Share = 0.5
    divergence: bool = False
    features: bool = True
    block: Count | None = None
    mask_id: TokenId | None = None
    length: Count | None = None

    def __post_init__(self) -> None:
        check_bounds(self)

    def bind(self, config: ModelConfig) -> Self:
        """Take block and mask from the draft; refuse what is none."""
        if config.kind not in MASKED_DRAFT_KINDS or config.block is None:
            raise ValueError(
                f"{config.architecture} is no draft that fills blocks, which dflash trains; "
                "give [model] a target and the configuration of a draft"
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
        """The example for the target, and blocks for the draft."""
        tokens = np.array([*example.prompt, *example.response])
        scored = np.arange(len(tokens)) >= len(example.prompt)
        places = np.flatnonzero(scored[:-1] & scored[1:])
        if self.fixed:
            return self.blocks(tokens, scored, places[:: self.block])
        count = min(self.anchors, len(places))
        return self.blocks(tokens, scored, np.sort(rng.choice(places, count, replace=False)))

    def blocks(self, tokens: Ints, scored: Bools, anchors: Ints) -> Rows:
        """Context rows, which see what is before them; then a block for each of `anchors`.

        `tokens i64[S]` are the example, `scored bool[S]` those to learn.
        """
        assert self.block and self.length and self.mask_id is not None, "bind the objective first"
        total, steps = len(tokens), np.arange(self.block)
        slots = anchors[:, None] + steps
        within = np.minimum(slots, total - 1)
        learnt = scored[within] & (slots < total) & (steps > 0)
        fall = np.exp(-(steps - 1) / self.gamma) if self.gamma else np.ones(self.block)
        weights = np.where(learnt, fall, 0.0)
        ranges = torch.zeros(*slots.shape, 2, 2, dtype=torch.int32)
        ranges[..., 0, 1] = torch.from_numpy(anchors)[:, None]
        ranges[..., 1, :] = torch.tensor([0, self.block]) + total
        ranges[..., 1, :] += torch.arange(len(anchors))[:, None, None] * self.block
        ids = np.where(steps > 0, self.mask_id, tokens[within])
        labels = np.where(learnt, tokens[within], UNSCORED)
        return Rows(
            ids=torch.from_numpy(np.append(tokens, ids)),
            # A block may hang over the end of what the draft knows; what is there is not scored.
            positions=torch.from_numpy(
                np.append(np.arange(total), np.minimum(slots, self.length - 1))
            ),
            ranges=torch.cat((causal(total), ranges.flatten(0, 1))),
            labels=torch.from_numpy(np.append(np.full(total, UNSCORED), labels)),
            weights=torch.from_numpy(np.append(np.zeros(total), weights).astype(np.float32)),
            mass=1.0 if self.dpace else float(weights.sum()),
        )

    def loss(self, models: Models, rows: Rows) -> Loss:
        """One pass of the target, one of the draft, and the weighted losses of all masks."""
        out = self.passes(models, rows)
        masks = torch.nonzero(out.labels != UNSCORED).squeeze(1)
        score = partial(self.score, models, out)
        losses, surprise, right = by_parts(score, masks, models.trained.config.vocab)
        weights = rows.weights[out.block]
        if self.dpace:
            weights = self.reach(surprise.detach(), masks, len(out.labels))
        hits = torch.zeros_like(out.labels)
        hits[masks] = right.long()
        kept = hits.view(-1, self.block or 1)[:, 1:].cumprod(1).sum(1) + 1
        return Loss(
            (losses * weights[masks]).sum(),
            {
                "accuracy": (hits.sum().float(), counted(masks)),
                "accepted": (kept.sum().float(), counted(kept)),
            },
        )

    def score(self, models: Models, out: Passes, masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of each of `masks`, how much its token surprises, and whether it is likeliest."""
        draft, target = models.trained, models.others["target"]
        labels = out.labels[masks]
        scores = draft.head(out.hidden[masks]).float().log_softmax(-1)
        losses = surprise = -scores.gather(1, labels[:, None]).squeeze(1)
        if out.context is not None:
            theirs = target.head(out.context[out.before[masks]]).float().log_softmax(-1)
            losses = F.kl_div(scores, theirs, reduction="none", log_target=True).sum(-1)
        return losses, surprise, scores.argmax(-1) == labels

    def passes(self, models: Models, rows: Rows) -> Passes:
        """Run the target over the context, and the draft over the blocks."""
        draft, target = models.trained, models.others["target"]
        assert isinstance(draft, BlockDraft)
        # Only the rows of blocks have a second range.
        block = rows.ranges[:, 1, 1] > rows.ranges[:, 1, 0]
        if not block.any():
            raise ValueError(
                "a block needs 2 response tokens that follow each other, but no example of a "
                "batch has more than 1; give longer responses"
            )
        inner, ranges = apart(rows.ranges, block)
        block = block.to(rows.ids.device)
        places, positions = rows.positions[~block], rows.positions[block]
        text = replace(rows, ids=rows.ids[~block], positions=places, ranges=inner)
        features, context = self.features_of(draft, target, text)
        attend = attention(draft.config, ranges, len(places), positions.device)
        if isinstance(draft, AddingDraft):
            attend = below(over_rows(draft.config, inner, positions.device), attend, len(places))
            hidden = behind(draft, text, features, rows.ids[block], positions, attend)
        else:
            hidden = draft(rows.ids[block], positions, attend, context=(features, places))
        before = ranges[:, 0, 0].to(positions) + positions - 1
        learnt = context if self.divergence else None
        return Passes(block, rows.labels[block], hidden, before, learnt)

    def reach(self, surprise: Tensor, masks: Tensor, rows: int) -> Tensor:
        """D-PACE's weights `f32[rows]`: how far the draft is expected to get with each mask.

        `surprise` are the negative log-probabilities of the scored rows, `masks` their places.
        """
        chance = surprise.new_ones(rows)
        chance[masks] = (1 - self.alpha) * torch.exp(-surprise) + self.alpha
        scored = torch.zeros_like(chance)
        scored[masks] = 1.0
        chance, scored = chance.view(-1, self.block or 1), scored.view(-1, self.block or 1)
        alive = chance.cumprod(1) * scored
        return (alive.flip(1).cumsum(1).flip(1) * scored).flatten()

    @torch.no_grad()
    def features_of(
        self, draft: BlockDraft, target: Transformer, text: Rows
    ) -> tuple[Tensor, Tensor]:
        """What the draft sees of the context, rows of plain `text`; the target's last states."""
        reading = Reading(draft.config.feature_layers, self.divergence)
        if self.features:
            return reading.states(target, text.ids, text.positions, text.ranges, text.features)
        tokens = target.embedding(text.ids)
        last = tokens
        if self.divergence:
            _, last = reading.states(target, text.ids, text.positions, text.ranges)
        return tokens.repeat(1, len(reading.layers)), last

    def reading(self, config: ModelConfig) -> Reading | None:
        """What the draft sees, unless that are tokens, and the target's distributions if learnt."""
        return Reading(config.feature_layers, self.divergence) if self.features else None


def behind(
    draft: AddingDraft, text: Rows, features: Tensor, ids: Tensor, positions: Tensor, attend: Attend
) -> Tensor:
    """Hidden states `[R, dim]` of block rows `ids i64[R]`, behind a text of C rows.

    Those of the text have `features [C, f]`, and those of blocks none.
    """
    every = torch.cat((text.ids, ids))
    wanted = torch.arange(len(text.ids), len(every), device=every.device)
    added = F.pad(features, (0, 0, 0, len(ids)))
    places = torch.cat((text.positions, positions))
    return draft.capture(every, places, attend, wanted=wanted, features=[added])[0]


def below(text: Attend, blocks: Attend, count: int) -> Attend:
    """Attention of `count` rows of text among themselves, and of block rows below over all."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        own = text(layer, q[:count], k[:count], v[:count], sinks)
        return torch.cat((own, blocks(layer, q[count:], k, v, sinks)))

    return attend


def counted(items: Tensor) -> Tensor:
    """How many there are, as a metric wants it."""
    return torch.tensor(float(len(items)), device=items.device)


def apart(ranges: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges of the context rows among themselves, and of the block rows over both.

    On the second axis all context rows come first, then all rows of blocks, as the draft hands
    them to its attention. `block bool[T]` says which of the packed rows are such.
    """
    before = F.pad(block.cumsum(0), (1, 0))
    context = torch.arange(len(ranges) + 1) - before
    inner, outer = ranges[~block].long(), ranges[block].long()
    own = context[-1] + before[outer[:, 1]]
    return context[inner].int(), torch.stack((context[outer[:, 0]], own), 1).int()


def attention(config: ModelConfig, ranges: Tensor, context: int, device: torch.device) -> Attend:
    """Attention of block rows over `context` rows and themselves, as each layer sees them."""
    block = config.block or 1
    most = max(RUN - RUN % block, block)
    _, counts = torch.unique_consecutive(ranges[:, 0, 0], return_counts=True)
    runs = [min(most, rows - at) for rows in counts.tolist() for at in range(0, rows, most)]
    own = context + torch.arange(len(ranges))

    def plan(sight: Sight) -> Attend:
        return HullAttention(over_blocks(sight, ranges, own), runs, device)

    return by_layer(config, plan)


def over_blocks(sight: Sight, ranges: Tensor, own: Tensor) -> Tensor:
    """What ranges of block rows become in one kind of layer.

    As in the published trainer, a window cuts the context only; a block is within it.
    """
    seen = through(sight, ranges, own)
    return torch.stack((seen[:, 0], torch.stack((ranges[:, 1, 0], seen[:, 1, 1]), 1)), 1)
