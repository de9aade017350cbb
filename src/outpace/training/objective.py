"""Objective: how an example becomes rows, and how rows are scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from outpace.models.config import ModelConfig
from outpace.models.draft import Draft
from outpace.models.transformer import Transformer
from outpace.training.data import Example
from outpace.training.reading import Reading
from outpace.training.rows import UNSCORED, Rows
from outpace.training.sights import hidden_states

ENTRIES = 2**26
"""Logits that are in memory at a time: a quarter of a GiB in float32."""

Targets = Callable[[Tensor], Tensor]
"""Distributions `f32[n, vocab]` that rows at places `i64[n]` learn."""


@dataclass(slots=True)
class Loss:
    """A sum over rows, and the metrics reported with it.

    Attributes:
        total: weighted sum over the rows; the trainer divides it by their mass.
        metrics: name to (sum, count); their quotient over all processes is what is reported.
    """

    total: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(slots=True)
class Models:
    """The model that is trained and those that only look on, by role."""

    trained: Transformer | Draft
    others: Mapping[str, Transformer] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A way to make rows; the options of a subclass are its fields.

    `roles` names the models that it looks at besides the trained one, `method` the decoding method
    that it trains for, where that is not the one of the model's family.
    """

    roles: ClassVar[tuple[str, ...]] = ()
    method: ClassVar[str | None] = None

    @property
    def taught(self) -> bool:
        """Whether the loss looks at a `teacher`, the trained model as it was at the start."""
        return False

    @property
    def forwards(self) -> int:
        """Passes of the trained model in one loss."""
        return 1

    @property
    def once(self) -> Self:
        """The objective with one pass in a loss, where that may have several."""
        return self

    @property
    def even(self) -> bool:
        """Whether that number is the same for all rows."""
        return True

    def reading(self, config: ModelConfig) -> Reading | None:
        """Hidden states of a target that the loss of a draft may read from files; None for none."""
        return None

    def bind(self, config: ModelConfig) -> Self:
        """The objective with what it must know of the model; refuses one that does not fit."""
        return self

    def rows(self, example: Example, rng: Generator) -> Rows:
        """Rows of one example; all chance comes from `rng`."""
        raise NotImplementedError

    def loss(self, models: Models, rows: Rows) -> Loss:
        """Weighted cross-entropy of the scored rows."""
        return cross_entropy(models.trained, hidden_states(models.trained, rows), rows)


def scored(rows: Rows) -> Tensor:
    """Places of the scored rows, `i64[scored]`."""
    return torch.nonzero(rows.labels != UNSCORED).squeeze(1)


def by_parts(
    score: Callable[[Tensor], tuple[Tensor, ...]], places: Tensor, vocab: int, passes: int = 1
) -> tuple[Tensor, ...]:
    """What `score` makes of rows at `places i64[n]`: tensors of n rows, by logits over a `vocab`.

    Where there are many rows or a large vocabulary, logits of some rows are there at a time, and
    are made again in the backward pass; so too where `passes` before it have many together.
    """
    few = max(ENTRIES // vocab, 1)
    if len(places) * passes <= few:
        return score(places)
    parts = [checkpoint(score, each, use_reentrant=False) for each in places.split(few)]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def cross_entropy(
    model: Transformer | Draft,
    hidden: Tensor,
    rows: Rows,
    targets: Targets | None = None,
    *,
    reverse: bool = False,
) -> Loss:
    """Weighted cross-entropy, with logits made for the scored rows only.

    `targets` gives distributions to learn in place of the labels; in `reverse` the loss is the
    divergence from them of what the model says.
    """

    def score(places: Tensor) -> tuple[Tensor, Tensor]:
        labels = rows.labels[places]
        logits = model.head(hidden[places]).float()
        learnt = labels if targets is None else targets(places)
        loss = (
            diverged(logits, learnt)
            if reverse
            else F.cross_entropy(logits, learnt, reduction="none")
        )
        return loss, logits.argmax(-1) == labels

    places = scored(rows)
    losses, hits = by_parts(score, places, model.config.vocab)
    counts = torch.tensor(float(len(places)), device=hidden.device)
    return Loss((losses * rows.weights[places]).sum(), {"accuracy": (hits.sum().float(), counts)})


def diverged(logits: Tensor, targets: Tensor) -> Tensor:
    """KL(model || target) `f32[n]` of `logits [n, vocab]` from distributions `[n, vocab]`."""
    says = logits.log_softmax(-1)
    # What underflows to nought has a bound, so that the divergence has one.
    return (says.exp() * (says - targets.clamp(min=torch.finfo(targets.dtype).tiny).log())).sum(-1)


def mean(losses: Sequence[Loss]) -> Loss:
    """The mean of losses of the same mass, with the metrics of all."""
    metrics: dict[str, tuple[Tensor, Tensor]] = {}
    for name in losses[0].metrics:
        sums, counts = zip(*(loss.metrics[name] for loss in losses), strict=True)
        metrics[name] = torch.stack(sums).sum(), torch.stack(counts).sum()
    return Loss(torch.stack([loss.total for loss in losses]).mean(), metrics)
