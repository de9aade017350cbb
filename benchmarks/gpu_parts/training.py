"""A training step of DFlash's objective on a random model of Qwen3-8B's shape.

Draft, objective, optimizer and precision are those of the recipe `qwen3-8b-dflash`: the target in
bfloat16 reads an example once, and a draft of five layers in float32 learns its blocks under
autocast. One example of the recipe's longest length is a step, and no block is recomputed.

Operations are those of the products and the attention of that step, counted as they run, the
target's attention as if each row saw all others. What is made a second time in the backward pass,
the logits, counts once. Rows are made ahead, as in a training run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.flop_counter import FlopCounterMode

from checkpoints import prompt
from gpu_parts.device import Found, Setup, timed
from gpu_parts.shapes import FURTHER, IDS, RECIPE, TARGETS
from harness import Bar, Row
from outpace.methods import DFlash
from outpace.models.draft import BlockDraft
from outpace.models.norm import freeze_model
from outpace.models.transformer import Transformer
from outpace.training import objectives
from outpace.training.data import Example
from outpace.training.objective import ENTRIES, LossModule, Models
from outpace.training.rows import UNSCORED, Rows

SHARE = 0.40
"""Of the rate of products, as wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """An example: tokens that are given and learnt, and how many blocks are laid in it."""

    given: int
    learnt: int
    anchors: int

    def rows(self, objective: objectives.DFlash) -> Rows:
        """What is fed of it."""
        tokens = prompt(self.given + self.learnt, IDS)
        example = Example(tokens[: self.given], tokens[self.given :], [False] * self.learnt)
        return objective.rows(example, np.random.default_rng(0))


FULL_SIZES = Lesson(given=256, learnt=(RECIPE.data.longest or 3072) - 256, anchors=512)
TINY_SIZES = Lesson(given=16, learnt=48, anchors=4)


LIKE = "share of the products' rate"
"""The column that is judged."""


def counted(step: Callable[[], None], rows: Rows, vocab: int, dim: int) -> int:
    """Operations of a step, without logits that are made again."""
    with FlopCounterMode(display=False) as counter:
        step()
    scored = int((rows.labels != UNSCORED).sum())
    again = 2 * scored * vocab * dim if scored > max(ENTRIES // vocab, 1) else 0
    return counter.get_total_flops() - again


def measure(setup: Setup, lesson: Lesson) -> Found:
    """Milliseconds of a step, and its operations beside those of products alone."""
    rows, bars = [], []
    for name in setup.budget.spend(["Qwen3-8B"]):
        rows.append(trained(setup, lesson, name))
        what, value = f"DFlash, a training step: {LIKE}", rows[-1][LIKE]
        bars.append(Bar(what=what, value=value, limit=SHARE, at_least=True))
    return {"training": rows}, bars


def trained(setup: Setup, lesson: Lesson, name: str) -> Row:
    """The step itself."""
    where = setup.where
    target = where.model(TARGETS[name])
    draft = replace(where, dtype=torch.float32).model(FURTHER[DFlash][1], target)
    assert isinstance(target, Transformer) and isinstance(draft, BlockDraft)
    freeze_model(target)
    draft.train().requires_grad_(True)
    given = RECIPE.objective
    assert isinstance(given, objectives.DFlash)
    objective = replace(given, anchors=lesson.anchors).bind(draft.config)
    scored = LossModule(objective, Models(draft, {"target": target}), RECIPE.train.precision)
    optimizers = RECIPE.optim.build_optimizers(draft)
    rows, device = lesson.rows(objective), torch.device(where.device)

    def step() -> None:
        loss, _ = scored(rows.to(device))
        (loss / rows.normaliser).backward()
        clip_grad_norm_(draft.parameters(), RECIPE.optim.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    needed = counted(step, rows, draft.config.vocab, draft.config.dim)
    taken = timed(step, rounds=3, calls=2)
    tokens = lesson.given + lesson.learnt
    row: Row = {"shape": name, "tokens": tokens, "rows": len(rows), "ms": taken * 1e3}
    row |= {"tokens/s": tokens / taken, "TFLOP/s": needed / taken / 1e12}
    return row | {LIKE: needed / taken / setup.card.multiplied}
