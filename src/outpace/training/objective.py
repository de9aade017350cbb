"""Objective: the rows of an example, and the loss over rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from outpace.decoding.renamed import accept_old_overrides
from outpace.models.config import ModelConfig
from outpace.models.draft import Draft
from outpace.models.transformer import Transformer
from outpace.training.data import Example
from outpace.training.feature_spec import FeatureSpec
from outpace.training.layer_attention import hidden_states
from outpace.training.rows import UNSCORED, Rows

ENTRIES = 2**26
"""Maximum number of logits in memory at a time: 0.25 GiB in float32."""

OLD_NAMES = {
    "taught": "needs_teacher",
    "forwards": "forward_count",
    "once": "single_forward",
    "even": "has_fixed_forwards",
    "reading": "feature_spec",
}
"""Old name of each overridable member, mapped to its current name."""

TargetFunction = Callable[[Tensor], Tensor]
"""Returns target distributions `f32[n, vocab]` of the rows at indices `i64[n]`."""


@dataclass(slots=True)
class Loss:
    """A summed loss over rows, with metrics.

    Attributes:
        total: weighted sum over the rows; the trainer divides it by their normaliser.
        metrics: name to (sum, count); the quotient of the sums over all processes is reported.
    """

    total: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(slots=True)
class Models:
    """The trained model, and frozen reference models by role."""

    trained: Transformer | Draft
    others: Mapping[str, Transformer] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A training objective; the fields of a subclass are its options.

    Attributes:
        roles: roles of the reference models that the loss needs.
        method: decoding method that it trains for, if not the default of the model's family.
    """

    roles: ClassVar[tuple[str, ...]] = ()
    method: ClassVar[str | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        accept_old_overrides(cls, OLD_NAMES)

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss needs a `teacher`, a frozen copy of the initial model."""
        return False

    @property
    def forward_count(self) -> int:
        """Number of forwards of the trained model per loss."""
        return 1

    @property
    def single_forward(self) -> Self:
        """The objective with one forward per loss if the number is an option."""
        return self

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

    If `passes` calls together exceed `ENTRIES` logits, the rows are scored in chunks with
    gradient checkpointing, so that the logits of one chunk are in memory at a time.

    Returns:
        The tensors of `score`, each of n rows.
    """
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
    KL(model || targets) instead.
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
