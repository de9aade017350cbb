"""EAGLE-3: trains a draft on its own states over several unrolled steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn import functional as F

from outpace.attention.ranges import RowRange, TrainingAttention, causal_ranges, find_documents
from outpace.decoding.target import Kind
from outpace.field_types import Count, Fraction
from outpace.models.config import ModelConfig
from outpace.models.extending import EagleDraft
from outpace.models.transformer import Transformer
from outpace.training.data import Example
from outpace.training.objective import (
    ENTRIES,
    FeatureSpec,
    Loss,
    Models,
    Objective,
    score_in_chunks,
)
from outpace.training.rows import UNSCORED, Rows


@dataclass(frozen=True, kw_only=True)
class Eagle3(Objective):
    """Train a draft that extends features as it decodes (EAGLE-3, Li et al., 2025, section 3).

    Training-time test: the target runs over an example once. Row i starts with the features of
    token i; each step's input is the row's state of the previous step and the next token, as in
    drafting. It attends to the first step of earlier rows, and to its own steps. Each step is
    scored against the target's distribution over the draft's vocabulary.
    """

    roles: ClassVar[tuple[str, ...]] = ("target",)
    method: ClassVar[str | None] = "eagle"

    tokens: Count = 7
    """Number of unrolled steps, one drafted token each."""
    discount: Fraction = 0.8
    """Weight of a step relative to the previous one."""
    length: Count | None = None
    """Maximum positions of the draft; set by it."""

    def feature_spec(self, config: ModelConfig) -> FeatureSpec:
        """Return the states of the draft's feature layers and of the target's head."""
        return FeatureSpec(config.feature_layers, last=True)

    def bind(self, config: ModelConfig) -> Self:
        """Set the length; `ValueError` unless it is an EAGLE draft."""
        if config.kind is not Kind.EAGLE or config.is_head:
            raise ValueError(
                f"eagle3 needs a draft that extends features, and {config.architecture} is not "
                "one; give [model] a target and the configuration of such a draft"
            )
        return replace(self, length=config.max_length)

    def rows(self, example: Example, rng: Generator) -> Rows:
        """Build causal rows of the example; the label of a row is the token after the next."""
        tokens = np.array([*example.prompt, *example.response])
        scored = np.arange(len(tokens)) >= max(len(example.prompt), 2)
        labels = np.where(scored, tokens, UNSCORED)
        labels = np.append(labels[2:], np.full(min(2, len(tokens)), UNSCORED))
        counts = [int((labels[step:] != UNSCORED).sum()) for step in range(self.tokens)]
        return Rows(
            ids=torch.from_numpy(tokens),
            positions=torch.arange(len(tokens)),
            ranges=causal_ranges(len(tokens)),
            labels=torch.from_numpy(labels),
            weights=torch.from_numpy((labels != UNSCORED).astype(np.float32)),
            normaliser=sum(count * self.discount**step for step, count in enumerate(counts)),
        )

    def loss(self, models: Models, rows: Rows) -> Loss:
        """Run the target once and the draft's steps, and compute their weighted loss."""
        draft, target = models.trained, models.others["target"]
        assert isinstance(draft, EagleDraft) and self.length is not None
        reading = self.feature_spec(draft.config)
        features, hidden = reading.read_states(
            target, rows.ids, rows.positions, rows.ranges, rows.features
        )
        spans = find_documents(rows.ranges)
        unrolled, (block,) = UnrolledAttention(spans, rows.ids.device), draft.blocks
        numbers = torch.arange(len(spans), device=rows.ids.device)
        lengths = torch.tensor([stop - start for start, stop in spans], device=rows.ids.device)
        texts = numbers.repeat_interleave(lengths)
        scored = rows.labels != UNSCORED
        judge = TargetDistributions(draft, target, hidden, scored, self.tokens)
        state, total, hits = draft.fuse_features(features), features.new_zeros(()), list[Tensor]()
        for step in range(self.tokens):
            # A row whose step is in another text is not scored, and no scored row attends to it.
            labels = shift_rows(rows.labels, step, UNSCORED)
            here = (labels != UNSCORED) & (shift_rows(texts, step, -1) == texts)
            embedded = draft.embed_tokens(shift_rows(rows.ids, step + 1, 0))
            positions = (rows.positions + step).clamp(max=self.length - 1)
            angles = draft.rotary_angles(positions, embedded.dtype)
            state = block(state, *angles, StepAttention(unrolled, step), context=embedded)
            places, right = torch.nonzero(here).squeeze(1), torch.zeros_like(here)
            score_rows = partial(score_step, draft, judge, state, step)
            losses, right[places] = score_in_chunks(
                score_rows, places, target.config.vocab, self.tokens
            )
            total = total + self.discount**step * losses.sum()
            hits.append(right)
        if not scored.any():
            raise ValueError(
                "a draft predicts from the third token of a text on, but no example of a batch "
                "has a response there; give longer responses"
            )
        every = torch.stack(hits)[:, scored].float()
        count = scored.sum().float()
        return Loss(
            total,
            {
                "accuracy": (every[0].sum(), count),
                "accepted": (every.cumprod(0).sum() + count, count),
            },
        )


class TargetDistributions:
    """The target's distributions over a draft's vocabulary, computed once per row if they fit."""

    # A row is scored in several steps, and a head over the whole vocabulary costs more than a small
    # draft.

    def __init__(
        self, draft: EagleDraft, target: Transformer, hidden: Tensor, scored: Tensor, steps: int
    ) -> None:
        """Prepare distributions for states `hidden [T, dim]` and `scored bool[T]` first labels."""
        self.draft, self.target, self.hidden = draft, target, hidden
        # Row i is scored in step k by the target's row i + k + 1.
        needed = torch.zeros(len(scored), dtype=torch.bool, device=scored.device)
        for step in range(steps):
            needed |= F.pad(scored, (step + 1, 0))[: len(scored)]
        rows = torch.nonzero(needed).squeeze(1)
        self.places = needed.cumsum(0) - 1
        self.computed: tuple[Tensor, Tensor] | None = None
        if len(rows) * draft.config.draft_vocab <= ENTRIES:
            parts = [
                self.compute(part) for part in rows.split(max(ENTRIES // target.config.vocab, 1))
            ]
            targets, in_vocabulary = zip(*parts, strict=True)
            self.computed = torch.cat(targets), torch.cat(in_vocabulary)

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return distributions `[n, D]`, and whether the top token is in the draft's vocabulary."""
        if self.computed is None:
            return self.compute(rows)
        targets, in_vocabulary = self.computed
        return targets[self.places[rows]], in_vocabulary[self.places[rows]]

    @torch.no_grad()
    def compute(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the distributions of rows `i64[n]`."""
        logits = self.target.compute_logits(self.hidden[rows]).float()
        top, vocabulary = logits.argmax(-1), self.draft.head_tokens
        if vocabulary is None:
            return logits.softmax(-1), torch.ones_like(top, dtype=torch.bool)
        return logits[:, vocabulary].softmax(-1), self.draft.t2d[top]


def score_step(
    draft: EagleDraft, judge: TargetDistributions, state: Tensor, step: int, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss at `places i64[n]`, and whether draft and target agree on the top token.

    `state` are the draft's states of a step. Rows whose top target token is not in the draft's
    vocabulary have loss 0.
    """
    scores = draft.head_logits(draft.norm(state[places])).float().log_softmax(-1)
    targets, in_vocabulary = judge(places + step + 1)
    right = in_vocabulary & (targets.argmax(-1) == scores.argmax(-1))
    return -(targets * scores).sum(-1) * in_vocabulary, right


def shift_rows(rows: Tensor, by: int, fill: int) -> Tensor:
    """Shift rows forward: row i becomes row i + `by`; the end is filled with `fill`."""
    return torch.cat((rows[by:], rows.new_full((min(by, len(rows)),), fill)))


class UnrolledAttention:
    """Attention over unrolled steps: a row sees earlier rows' first step and its own steps."""

    def __init__(self, spans: Sequence[RowRange], device: torch.device) -> None:
        """Prepare the padded layout of the texts in `spans`."""
        starts, stops = torch.tensor(spans, device=device).unbind(1)
        steps = torch.arange(int((stops - starts).max()), device=device)
        self.is_real = steps < (stops - starts)[:, None]
        self.places = torch.where(self.is_real, starts[:, None] + steps, 0)
        self.causal_mask = steps > steps[:, None]
        self.keys: dict[int, Tensor] = {}
        """`[T, H, D]` by step."""
        self.values: dict[int, Tensor] = {}
        """`[T, H, D]` by step."""

    def attend_step(self, step: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with `q [T, H, D]` of a step, whose keys and values are `k, v [T, K, D]`."""
        shared = q.shape[1] // k.shape[1]
        self.keys[step] = k.repeat_interleave(shared, 1)
        self.values[step] = v.repeat_interleave(shared, 1)
        first, *keys = (self.keys[at] for at in range(step + 1))
        base, *values = (self.values[at] for at in range(step + 1))
        q = q * q.shape[-1] ** -0.5
        before = torch.einsum("blhd,bmhd->bhlm", q[self.places], first[self.places])
        before = before.masked_fill(self.causal_mask, -torch.inf)
        own = [(q * key).sum(-1)[self.places].transpose(1, 2)[..., None] for key in keys]
        weights = torch.cat((before, *own), -1).softmax(-1)
        length = before.shape[-1]
        attended = torch.einsum("bhlm,bmhd->blhd", weights[..., :length], base[self.places])
        out = attended[self.is_real]
        for at, value in enumerate(values, length):
            out = out + weights[..., at].transpose(1, 2)[self.is_real][..., None] * value
        return out


@dataclass(slots=True)
class StepAttention(TrainingAttention):
    """The attention of one step."""

    unrolled: UnrolledAttention
    step: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend with `q [T, H, D]` over `k, v [T, K, D]` and the stored keys of earlier steps."""
        assert sinks is None
        return self.unrolled.attend_step(self.step, q, k, v)
