"""Objective: the rows of an example, and the loss over rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from numpy.random import Generator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from outpace.field_types import check_fields
from outpace.models.config import ModelConfig
from outpace.models.draft import Draft
from outpace.models.transformer import Stack, Transformer
from outpace.training.data import Example
from outpace.training.layer_attention import hidden_states, plan_row_attention
from outpace.training.rows import UNSCORED, Rows


@dataclass(frozen=True)
class FeatureSpec:
    """The hidden states of a target that a loss reads."""

    layers: tuple[int, ...]
    """Layers whose outputs are the draft's features."""
    last: bool
    """Whether states after the final norm are included, for the target's distributions."""

    def feature_width(self, target: ModelConfig) -> int:
        """Return the width of a stored row."""
        return (len(self.layers) + self.last) * target.dim

    @torch.no_grad()
    def read_states(
        self,
        target: Transformer,
        ids: Tensor,
        positions: Tensor,
        ranges: Tensor,
        stored: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the states of C rows, or split those `stored` by `joined_states`.

        Returns:
            States of `layers`, concatenated, `[C, layers · dim]`, and states after the final
            norm, `[C, dim]`; the latter are invalid without `last`.
        """
        if stored is not None:
            inner = len(self.layers) * target.config.dim
            return stored[:, :inner], stored[:, inner:]
        attend = plan_row_attention(target.config, ranges, ids.device)
        last, captured = target.capture_layers(ids, positions, attend, self.layers)
        return torch.cat([captured[layer] for layer in self.layers], -1), last

    def joined_states(
        self, target: Transformer, ids: Tensor, positions: Tensor, ranges: Tensor
    ) -> Tensor:
        """Compute the states of C rows in the stored layout, `[C, width]`."""
        features, last = self.read_states(target, ids, positions, ranges)
        return torch.cat((features, last), -1) if self.last else features


ENTRIES = 2**26
"""Maximum number of logits in memory at a time: 0.25 GiB in float32."""


TargetFunction = Callable[[Tensor], Tensor]
"""Returns target distributions `f32[n, vocab]` of the rows at indices `i64[n]`."""


@dataclass(slots=True)
class Loss:
    """A summed loss over rows, with metrics."""

    total: Tensor
    """Weighted sum over the rows; the trainer divides it by their normaliser."""
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Name to (sum, count); the quotient of the sums over all processes is reported."""


@dataclass(slots=True)
class Models:
    """The trained model, and frozen reference models by role."""

    trained: Transformer | Draft
    others: Mapping[str, Transformer] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A training objective; the fields of a subclass are its options."""

    roles: ClassVar[tuple[str, ...]] = ()
    """Roles of the reference models that the loss needs."""
    method: ClassVar[str | None] = None
    """Decoding method that it trains for, if not the default of the model's family."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss needs a `teacher`, a frozen copy of the initial model."""
        return False

    @property
    def has_fixed_forwards(self) -> bool:
        """Whether the number of forwards is the same for all rows."""
        return True

    def feature_spec(self, config: ModelConfig) -> FeatureSpec | None:
        """Return the target's hidden states that a draft's loss reads and that can be stored."""
        return None

    def bind(self, config: ModelConfig) -> Self:
        """Return the objective with its model-dependent options set.

        Raises:
            ValueError: the objective cannot train such a model.
        """
        return self

    def rows(self, example: Example, rng: Generator) -> Rows:
        """Build the rows of one example; `rng` is the only source of randomness."""
        raise NotImplementedError

    def loss(self, models: Models, rows: Rows) -> Loss:
        """Compute the weighted cross-entropy of the scored rows."""
        return cross_entropy(models.trained, hidden_states(models.trained, rows), rows)


def scored_places(rows: Rows) -> Tensor:
    """Return the indices of the scored rows, `i64[scored]`."""
    return torch.nonzero(rows.labels != UNSCORED).squeeze(1)


def score_in_chunks(
    score: Callable[[Tensor], tuple[Tensor, ...]], places: Tensor, vocab: int, passes: int = 1
) -> tuple[Tensor, ...]:
    """Apply `score`, which computes logits over `vocab`, to rows at indices `places i64[n]`.

    Returns:
        The tensors of `score`, each of n rows.
    """
    # If `passes` calls together exceed `ENTRIES` logits, the rows are scored in chunks with
    # gradient checkpointing, so that the logits of one chunk are in memory at a time.
    size = max(ENTRIES // vocab, 1)
    if len(places) * passes <= size:
        return score(places)
    parts = [checkpoint(score, each, use_reentrant=False) for each in places.split(size)]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def cross_entropy(
    model: Transformer | Draft,
    hidden: Tensor,
    rows: Rows,
    targets: TargetFunction | None = None,
    *,
    reverse: bool = False,
) -> Loss:
    """Compute the weighted cross-entropy, with logits for the scored rows only.

    `targets` returns distributions that replace the labels. With `reverse` the loss is
    KL(model || targets) instead. Without gradients it is KL(targets || model): the entropy of the
    targets, which no model falls below, would hide what is learnt.
    """

    def score(places: Tensor) -> tuple[Tensor, Tensor]:
        labels = rows.labels[places]
        logits = model.compute_logits(hidden[places]).float()
        target = labels if targets is None else targets(places)
        loss = (
            reverse_kl(logits, target)
            if reverse
            else F.cross_entropy(logits, target, reduction="none")
        )
        if targets is not None and not reverse and not torch.is_grad_enabled():
            loss = loss - torch.special.entr(target).sum(-1)
        return loss, logits.argmax(-1) == labels

    places = scored_places(rows)
    losses, hits = score_in_chunks(score, places, model.config.vocab)
    counts = torch.tensor(float(len(places)), device=hidden.device)
    return Loss((losses * rows.weights[places]).sum(), {"accuracy": (hits.sum().float(), counts)})


def reverse_kl(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute KL(model || target) `f32[n]` of `logits` and distributions, both `[n, vocab]`."""
    logs = logits.log_softmax(-1)
    # Probabilities that underflow to zero are clamped, so that the divergence stays finite.
    return (logs.exp() * (logs - targets.clamp(min=torch.finfo(targets.dtype).tiny).log())).sum(-1)


def mean_loss(losses: Sequence[Loss]) -> Loss:
    """Average losses with equal normalisers; their metrics are summed."""
    metrics: dict[str, tuple[Tensor, Tensor]] = {}
    for name in losses[0].metrics:
        sums, counts = zip(*(loss.metrics[name] for loss in losses), strict=True)
        metrics[name] = torch.stack(sums).sum(), torch.stack(counts).sum()
    return Loss(torch.stack([loss.total for loss in losses]).mean(), metrics)


LossAndMetrics = tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]
"""A summed loss, and its metrics."""


class LossModule(nn.Module):
    """A module whose forward computes the loss of rows, so that wrappers see all of it."""

    def __init__(self, objective: Objective, models: Models, precision: str) -> None:
        super().__init__()
        self.objective, self.models, self.precision = objective, models, precision
        self.trained = models.trained

    def forward(self, rows: Rows, reading: FeatureSpec | None = None) -> LossAndMetrics | Tensor:
        """Compute the loss of rows; given `reading`, the target's states of that feature spec."""
        # Accelerate's own setting would apply to all trainers of the process.
        with torch.autocast(rows.ids.device.type, torch.bfloat16, self.precision == "bf16"):
            if reading is not None:
                target = self.models.others["target"]
                return reading.joined_states(target, rows.ids, rows.positions, rows.ranges)
            loss = self.objective.loss(self.models, rows)
        return loss.total, loss.metrics


def build_teachers(objective: Objective, model: Stack, adapted: bool) -> dict[str, Transformer]:
    """Copy the initial model as teacher if needed; under an adapter it shares the weights."""
    if not objective.needs_teacher:
        return {}
    assert isinstance(model, Transformer)
    shared = (*model.parameters(), *model.buffers()) if adapted else ()
    return {"teacher": deepcopy(model, {id(parameter): parameter for parameter in shared})}


def ignore_norm_advice() -> None:
    """Ignore PyTorch's advice on norms of mixed precision: a CPU has no fused one to choose."""
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
