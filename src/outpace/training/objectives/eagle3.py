"""EAGLE-3: a draft that goes on from its own states, several steps in a row, while it learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from outpace.attention.ranges import Span, TrainingAttention, causal, documents
from outpace.decoding.target import Kind
from outpace.models.config import ModelConfig
from outpace.models.extending import ExtendingDraft
from outpace.models.transformer import Attend, Transformer
from outpace.training.data import Example
from outpace.training.kinds import Count, Share, check_bounds
from outpace.training.objective import Loss, Models, Objective, by_parts
from outpace.training.reading import Reading
from outpace.training.rows import UNSCORED, Rows


@dataclass(frozen=True, kw_only=True)
class Eagle3(Objective):
    """Train a draft that extends features as it decodes (EAGLE-3, Li et al., 2025, section 3).

    Training-time test: the target reads an example once. Row i begins with the features of token i,
    and in each step takes in its state of the step before and the next token, as when it drafts. It
    sees the first step of all rows before it, and its own of all steps. Each step is scored on the
    target's distribution, as far as the draft may say it.

    Attributes:
        tokens: how many in a row it learns to draft, one in each step.
        discount: weight of a step, against that of the one before it.
        length: positions that the draft knows; taken from it.
    """

    roles: ClassVar[tuple[str, ...]] = ("target",)
    method: ClassVar[str | None] = "eagle"

    tokens: Count = 7
    discount: Share = 0.8
    length: Count | None = None

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def forwards(self) -> int:
        """One for each step."""
        return self.tokens

    def reading(self, config: ModelConfig) -> Reading:
        """What the draft goes on from, and the target's distributions."""
        return Reading(config.feature_layers, last=True)

    def bind(self, config: ModelConfig) -> Self:
        """Take the length from the draft; refuse what is none."""
        if config.kind is not Kind.EXTENDING:
            raise ValueError(
                f"{config.architecture} is no draft that extends features, which eagle3 trains; "
                "give [model] a target and the configuration of such a draft"
            )
        return replace(self, length=config.max_length)

    def rows(self, example: Example, rng: Generator) -> Rows:
        """The example as it stands; a row is scored on the token after the next."""
        tokens = np.array([*example.prompt, *example.response])
        learnt = np.arange(len(tokens)) >= max(len(example.prompt), 2)
        labels = np.where(learnt, tokens, UNSCORED)
        labels = np.append(labels[2:], np.full(min(2, len(tokens)), UNSCORED))
        counts = [int((labels[step:] != UNSCORED).sum()) for step in range(self.tokens)]
        return Rows(
            ids=torch.from_numpy(tokens),
            positions=torch.arange(len(tokens)),
            ranges=causal(len(tokens)),
            labels=torch.from_numpy(labels),
            weights=torch.from_numpy((labels != UNSCORED).astype(np.float32)),
            mass=sum(count * self.discount**step for step, count in enumerate(counts)),
        )

    def loss(self, models: Models, rows: Rows) -> Loss:
        """One pass of the target, and the weighted losses of all steps of the draft."""
        draft, target = models.trained, models.others["target"]
        assert isinstance(draft, ExtendingDraft) and self.length is not None
        reading = self.reading(draft.config)
        features, hidden = reading.states(
            target, rows.ids, rows.positions, rows.ranges, rows.features
        )
        spans = documents(rows.ranges)
        unrolled, (block,) = Unrolled(spans, rows.ids.device), draft.blocks
        numbers = torch.arange(len(spans), device=rows.ids.device)
        lengths = torch.tensor([stop - start for start, stop in spans], device=rows.ids.device)
        texts = numbers.repeat_interleave(lengths)
        state, total, hits = draft.fuse(features), features.new_zeros(()), list[Tensor]()
        for step in range(self.tokens):
            # A row whose step lies in another text is not scored, and seen by no row that is.
            labels = later(rows.labels, step, UNSCORED)
            here = (labels != UNSCORED) & (later(texts, step, -1) == texts)
            beside = draft.embed(later(rows.ids, step + 1, 0))
            positions = (rows.positions + step).clamp(max=self.length - 1)
            turn = draft.angles(positions, beside.dtype)
            state = block(state, *turn, unrolled.at(step), context=beside)
            places, right = torch.nonzero(here).squeeze(1), torch.zeros_like(here)
            said = partial(score, draft, target, state, hidden[step + 1 :])
            losses, right[places] = by_parts(said, places, target.config.vocab, self.tokens)
            total = total + self.discount**step * losses.sum()
            hits.append(right)
        scored = rows.labels != UNSCORED
        if not scored.any():
            raise ValueError(
                "the third token of a text is the first that a draft predicts, but no example of a "
                "batch has one to learn; give longer responses"
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


def score(
    draft: ExtendingDraft, target: Transformer, state: Tensor, hidden: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss of each state `[n, dim]` at `places i64[n]`, and whether it says what the target does.

    `hidden` are the target's at the same places, whose distributions are learnt. A row whose most
    probable token the draft may not say is not learnt.
    """
    assert draft.unembedding is not None
    scores: Tensor = draft.unembedding(draft.norm(state[places])).float().log_softmax(-1)
    with torch.no_grad():
        logits = target.head(hidden[places]).float()
        said, says = logits.argmax(-1), draft.says
        known = torch.ones_like(said, dtype=torch.bool)
        if says is not None:
            logits, known = logits[:, says], draft.t2d[said]
        law = logits.softmax(-1)
        right = known & (law.argmax(-1) == scores.argmax(-1))
    return -(law * scores).sum(-1) * known, right


def later(rows: Tensor, by: int, fill: int) -> Tensor:
    """Each row as the one `by` places behind it."""
    return torch.cat((rows[by:], rows.new_full((min(by, len(rows)),), fill)))


class Unrolled:
    """Attention of steps in a row: a row sees the first of the rows before, and all of itself.

    `keys` and `values` have `[T, K, D]` of each step so far.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        """Lay texts `spans` side by side, each from its first row on."""
        starts, stops = torch.tensor(spans, device=device).unbind(1)
        steps = torch.arange(int((stops - starts).max()), device=device)
        self.real = steps < (stops - starts)[:, None]
        self.places = torch.where(self.real, starts[:, None] + steps, 0)
        self.hidden = steps > steps[:, None]
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def at(self, step: int) -> Attend:
        """The `attend` of a step; one that is run again puts its keys where they were."""
        return Step(self, step)

    def attend(self, step: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend `q [T, H, D]` of a step, whose keys and values are `k, v [T, K, D]`."""
        shared = q.shape[1] // k.shape[1]
        self.keys[step] = k.repeat_interleave(shared, 1)
        self.values[step] = v.repeat_interleave(shared, 1)
        first, *keys = (self.keys[at] for at in range(step + 1))
        base, *values = (self.values[at] for at in range(step + 1))
        q = q * q.shape[-1] ** -0.5
        before = torch.einsum("blhd,bmhd->bhlm", q[self.places], first[self.places])
        before = before.masked_fill(self.hidden, -torch.inf)
        own = [(q * key).sum(-1)[self.places].transpose(1, 2)[..., None] for key in keys]
        weights = torch.cat((before, *own), -1).softmax(-1)
        length = before.shape[-1]
        seen = torch.einsum("bhlm,bmhd->blhd", weights[..., :length], base[self.places])
        out = seen[self.real]
        for at, value in enumerate(values, length):
            out = out + weights[..., at].transpose(1, 2)[self.real][..., None] * value
        return out


@dataclass(slots=True)
class Step(TrainingAttention):
    """The `attend` of one step."""

    unrolled: Unrolled
    step: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend `q [T, H, D]` over `k, v [T, K, D]` and what was kept of the steps before."""
        assert sinks is None
        return self.unrolled.attend(self.step, q, k, v)
