"""Tests of EAGLE-3: the loss equals that of step-by-step drafting."""

import numpy as np
import pytest
import torch
from numpy.random import default_rng

from helpers import VOCAB, causal_model, dense, extending_draft, whole
from naive import ahead
from outpace.models.extending import EagleDraft
from outpace.training.data import Example
from outpace.training.objective import Models
from outpace.training.objectives import Eagle3
from outpace.training.rows import UNSCORED, pack_documents

TARGET = causal_model(seed=1)
EXAMPLES = [
    Example(prompt=[3, 1, 4], response=[1, 5, 9, 2, 6], marks=[False] * 5),
    Example(prompt=[7], response=[2, 8, 1], marks=[False] * 3),
    Example(prompt=[5, 3, 5, 8, 9], response=[7, 9], marks=[False] * 2),
]


def new_draft(*, whole_vocabulary: bool) -> EagleDraft:
    """A draft with trainable weights, whose vocabulary may lack three tokens."""
    head_tokens = torch.tensor([n for n in range(VOCAB) if whole_vocabulary or n not in (1, 9, 20)])
    draft = extending_draft(TARGET, draft_vocab_size=len(head_tokens)).requires_grad_(True)
    if not whole_vocabulary:
        draft.d2t = head_tokens - torch.arange(len(head_tokens))
        draft.t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, head_tokens, True)
        draft.check_tables()
    return draft


def by_hand(draft: EagleDraft, objective: Eagle3, example: Example) -> tuple[float, list[int]]:
    """Loss of an example, row by row and step by step as a draft would run; hits of each step."""
    ids, layers = [*example.prompt, *example.response], draft.config.feature_layers
    logits = whole(TARGET, ids, causal=True).double()
    rows, places = torch.tensor(ids), torch.arange(len(ids))
    _, captured = TARGET.capture_layers(rows, places, dense(causal=True), layers)
    features = torch.cat([captured[layer] for layer in layers], -1)
    total, hits = 0.0, [0] * objective.tokens
    for step in range(objective.tokens):
        for row in range(len(ids)):
            at = row + step + 2
            if not max(len(example.prompt), 2 + step) <= at < len(ids):
                continue
            path = ids[row + 2 : at]
            ours = ahead(draft, features[: row + 1], ids[: row + 2], path).double()
            head_tokens = (
                draft.head_tokens if draft.head_tokens is not None else torch.arange(VOCAB)
            )
            if int(logits[at - 1].argmax()) not in head_tokens:
                continue
            law = logits[at - 1, head_tokens].softmax(-1)
            total -= objective.discount**step * float((law * ours[head_tokens]).sum())
            hits[step] += int(ours.argmax()) == int(logits[at - 1].argmax())
    return total, hits


@pytest.mark.parametrize("computed_once", [True, False])
@pytest.mark.parametrize("whole_vocabulary", [True, False])
def test_loss_is_that_of_drafts_step_by_step(
    whole_vocabulary: bool, computed_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.training.objective.ENTRIES", 3 * VOCAB)
    if not computed_once:
        monkeypatch.setattr("outpace.training.objectives.eagle3.ENTRIES", 3 * VOCAB)
    draft = new_draft(whole_vocabulary=whole_vocabulary)
    objective = Eagle3(tokens=4, discount=0.7).bind(draft.config)
    rows = pack_documents([objective.rows(example, default_rng(0)) for example in EXAMPLES])
    loss = objective.loss(Models(draft, {"target": TARGET}), rows)
    expected = [by_hand(draft, objective, example) for example in EXAMPLES]
    assert float(loss.total.detach()) == pytest.approx(
        sum(total for total, _ in expected), rel=1e-4
    )
    hits = np.sum([hits for _, hits in expected], 0)
    scored = int((rows.labels != UNSCORED).sum())
    assert [float(value) for value in loss.metrics["accuracy"]] == [hits[0], scored]
    assert scored == 5 + 2 + 2
    loss.total.backward()
    assert all(parameter.grad is not None for parameter in draft.parameters())
    assert not any(parameter.requires_grad for parameter in TARGET.parameters())


def test_mass_is_what_the_weights_sum_to() -> None:
    objective = Eagle3(tokens=3, discount=0.5)
    rows = objective.rows(EXAMPLES[0], default_rng(0))
    assert rows.labels.tolist() == [UNSCORED, 1, 5, 9, 2, 6, UNSCORED, UNSCORED]
    assert rows.normaliser == 5 + 0.5 * 5 + 0.25 * 4
    short = objective.rows(Example(prompt=[], response=[5], marks=[False]), default_rng(0))
    assert short.labels.tolist() == [UNSCORED] and short.normaliser == 0
