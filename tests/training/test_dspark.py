"""Tests of the DFlash objective with DSpark drafts, against the formulas of the paper."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from torch import Tensor

from helpers import MASK, VOCAB, causal_model, close, dense, published
from outpace.checkpoints.checkpoint import translate_config
from outpace.training import weights
from outpace.training.objective import Loss, Models
from outpace.training.objectives import DFlash as Objective
from outpace.training.rows import Rows, pack_documents
from speculator_configs import dspark
from training.test_dflash import example

RANK, BLOCK = 4, 7
HEADS = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
HEADS |= {"confidence_head_with_markov": True}
NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False}
VARIANTS = [
    {},
    NO_HEADS,
    {"enable_confidence_head": False},
    {"confidence_head_with_markov": False},
    {"markov_rank": 0, "confidence_head_with_markov": False},
]
"""All combinations of heads; the second is a DFlash draft of the same authors."""


def config(**changes: Any) -> dict[str, Any]:
    return {
        **published("Qwen3DSparkModel"),
        "head_dim": 8,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": [0, 1],
        **HEADS,
        **changes,
    }


class Pair:
    def __init__(self, changes: dict[str, Any] | None = None, **options: Any) -> None:
        self.target = causal_model()
        self.draft = weights.build_draft(config(**changes or {}), self.target, 0)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.draft.parameters():
            if parameter.dim() == 2:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
        self.objective = Objective(**options).bind(self.draft.config)
        texts = torch.randint(0, MASK, (2, 20), generator=generator).tolist()
        self.texts = [(texts[0], 5, [5, 9, 17]), (texts[1][:13], 3, [4, 11])]

    def rows(self) -> Rows:
        return pack_documents(
            [
                self.objective.block_rows(
                    np.array(text), np.arange(len(text)) >= prompt, np.array(anchors)
                )
                for text, prompt, anchors in self.texts
            ]
        )

    def loss(self) -> Loss:
        return self.objective.loss(Models(self.draft, {"target": self.target}), self.rows())

    def blocks(self) -> list[tuple[list[int], int, Tensor, Tensor]]:
        """Return text, anchor, hidden states and the target's logits of each block, run alone."""
        found = []
        for text, _, anchors in self.texts:
            places = torch.arange(len(text))
            states, captured = self.target.capture_layers(
                torch.tensor(text), places, dense(causal=True), (0, 1)
            )
            features = torch.cat([captured[0], captured[1]], -1)
            for anchor in anchors:
                ids = torch.tensor([text[anchor]] + [MASK] * (BLOCK - 1))
                hidden = self.draft(
                    ids,
                    anchor + torch.arange(BLOCK),
                    dense(causal=False),
                    context=(features[:anchor], places[:anchor]),
                )
                found.append((text, anchor, hidden, self.target.compute_logits(states)))
        return found

    def step_logits(self, hidden: Tensor, previous: int) -> Tensor:
        weight = dict(self.draft.named_parameters())
        logits = weight["unembedding.weight"] @ hidden
        if "transition.weight" in weight:
            before = weight["previous_embedding.weight"][previous]
            logits = logits + weight["transition.weight"] @ before
        return logits

    def confidence(self, hidden: Tensor, previous: int) -> Tensor:
        weight = dict(self.draft.named_parameters())
        if self.draft.config.chain.reads_previous:
            hidden = torch.cat((hidden, weight["previous_embedding.weight"][previous]))
        return torch.sigmoid(weight["acceptance.weight"][0] @ hidden + weight["acceptance.bias"][0])

    def naive_loss(self, gamma: float, shares: tuple[float, float, float]) -> tuple[Tensor, float]:
        """Return the loss of equations 9 to 12 of the paper, and the sum of its weights."""
        total, mass = torch.zeros(()), 0.0
        for text, anchor, hidden, logits in self.blocks():
            for k in range(1, min(BLOCK, len(text) - 1 - anchor) + 1):
                weight = math.exp(-(k - 1) / gamma)
                previous, label = text[anchor + k - 1], text[anchor + k]
                draft = self.step_logits(hidden[k - 1], previous).softmax(0)
                target = logits[anchor + k - 1].softmax(0)
                distance = (draft - target).abs().sum()
                terms = [-draft[label].log(), distance]
                if shares[2]:
                    rate = 1 - distance.detach() / 2
                    sure = self.confidence(hidden[k - 1], previous)
                    terms.append(-rate * sure.log() - (1 - rate) * (1 - sure).log())
                total = total + weight * sum(a * b for a, b in zip(shares, terms, strict=False))
                mass += weight
        return total, mass


def shares(changes: dict[str, Any]) -> tuple[float, float, float]:
    heads = {**HEADS, **changes}
    has_heads = heads["markov_rank"] > 0 or heads["enable_confidence_head"]
    token, distance = (0.1, 0.9) if has_heads else (1.0, 0.0)
    return token, distance, float(heads["enable_confidence_head"])


@pytest.mark.parametrize("changes", VARIANTS)
def test_loss_and_gradients_are_those_of_the_paper(changes: dict[str, Any]) -> None:
    ours, plain = Pair(changes), Pair(changes)
    loss = ours.loss()
    expected, mass = plain.naive_loss(4.0, shares(changes))
    assert ours.rows().normaliser == pytest.approx(mass, rel=1e-6)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.total.backward()
    expected.backward()
    names = {name for name, _ in ours.draft.named_parameters()}
    assert ("transition.weight" in names, "acceptance.bias" in names) == (
        {**HEADS, **changes}["markov_rank"] > 0,
        {**HEADS, **changes}["enable_confidence_head"],
    )
    for name in names:
        theirs = plain.draft.get_parameter(name).grad
        assert theirs is not None and theirs.abs().max() > 0, name
        torch.testing.assert_close(
            ours.draft.get_parameter(name).grad, theirs, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("options", "gamma", "terms"),
    [
        ({"gamma": 2.0}, 2.0, (0.1, 0.9, 1.0)),
        ({"total_variation": 0.0, "confidence": 0.3}, 4.0, (1.0, 0.0, 0.3)),
        ({"total_variation": 1.0}, 4.0, (0.0, 1.0, 1.0)),
    ],
)
def test_weights_of_the_terms(
    options: dict[str, Any], gamma: float, terms: tuple[float, float, float]
) -> None:
    pair = Pair(**options)
    assert pair.loss().total.item() == pytest.approx(
        pair.naive_loss(gamma, terms)[0].item(), rel=1e-5
    )


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, NO_HEADS])
def test_accepted_is_that_of_drafts_chosen_one_after_another(changes: dict[str, Any]) -> None:
    pair, lengths = Pair(changes), []
    for name, parameter in pair.draft.named_parameters():
        if name in ("fusion.weight", "transition.weight", "unembedding.weight"):
            parameter.mul_(0.1)  # so that some drafts are right
    pair.texts = [(chosen_text(pair, prompt), len(prompt), [4, 6, 10]) for prompt in ([3, 1], [9])]
    for text, anchor, hidden, _ in pair.blocks():
        previous, count = text[anchor], 0
        for k in range(1, min(BLOCK, len(text) - 1 - anchor) + 1):
            previous = int(pair.step_logits(hidden[k - 1], previous).argmax())
            if previous != text[anchor + k]:
                break
            count += 1
        lengths.append(count + 1)
    loss = pair.loss()
    total, count = loss.metrics["accepted"]
    assert (float(total), float(count)) == (sum(lengths), len(lengths))
    assert max(lengths) > 2 and min(lengths) < BLOCK + 1
    hits = loss.metrics["accuracy"][0]
    assert hits >= sum(lengths) - len(lengths)


def chosen_text(pair: Pair, prompt: list[int]) -> list[int]:
    """Return a text whose first block after slot 4 is that of the draft, up to two tokens."""
    text = [*prompt, *default_rng(len(prompt)).integers(0, MASK, 20 - len(prompt)).tolist()]
    for anchor, right in ((4, 2), (6, 3), (10, 5)):
        pair.texts = [(text, len(prompt), [anchor])]
        ((_, _, hidden, _),) = pair.blocks()
        for k in range(1, right + 1):
            text[anchor + k] = int(pair.step_logits(hidden[k - 1], text[anchor + k - 1]).argmax())
    return text


def test_every_row_of_a_block_predicts_the_slot_after_it() -> None:
    objective = Objective(anchors=1).bind(translate_config(config()))
    assert (objective.gamma, objective.total_variation, objective.confidence) == (4.0, 0.9, 1.0)
    rows = objective.rows(example(3, 9), default_rng(0))
    anchor = int(rows.ids[12])
    assert rows.ids[12:].tolist() == [anchor, *[MASK] * (BLOCK - 1)]
    assert rows.positions[12:].tolist() == list(range(anchor, anchor + BLOCK))
    seen = [slot if slot < 12 else -100 for slot in range(anchor + 1, anchor + 1 + BLOCK)]
    assert rows.labels[12:].tolist() == seen
    fall = [math.exp(-k / 4) * (slot > 0) for k, slot in enumerate(seen)]
    assert rows.weights[12:].tolist() == pytest.approx(fall)
    fixed = Objective(fixed=True).bind(translate_config(config()))
    rows = fixed.rows(example(2, 18), default_rng(0))
    labels = [label for label in rows.labels.tolist() if label >= 0]
    assert labels == list(range(3, 20))


@pytest.mark.parametrize("options", [{"dpace": True}, {"divergence": True}])
def test_other_options_hold(options: dict[str, Any]) -> None:
    plain, other = Pair(), Pair(**options)
    loss = other.loss().total
    loss.backward()
    assert loss.isfinite() and loss.item() != plain.loss().total.item()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in other.draft.parameters())


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("confidence", NO_HEADS, {"confidence": 0.5}),
        ("confidence", {"enable_confidence_head": False}, {"confidence": 1.0}),
        ("confidence", {}, {"confidence": 0.0}),
        ("confidence", {}, {"confidence": -1.0}),
        ("total_variation", {}, {"total_variation": 1.5}),
        ("markov_head_type", {"markov_head_type": "rnn"}, {}),
        ("Markov", {"markov_rank": 0}, {}),
    ],
)
def test_other_heads_and_options_are_refused(
    name: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=name):
        Objective(**options).bind(translate_config(config(**changes)))


def test_a_mask_of_speculators_reads_the_token_before_its_slot() -> None:
    target, tokens = causal_model(), [*range(3, VOCAB)]
    fields = dspark(
        block_size=BLOCK,
        sample_from_anchor=False,
        enable_confidence_head=False,
        draft_vocab_size=len(tokens),
    )
    draft = weights.build_draft(fields, target, 0)
    weights.cover_tokens(draft, torch.tensor(tokens))
    draft.transition.weight.data.normal_(generator=torch.Generator().manual_seed(2))
    objective = Objective(total_variation=0.0, gamma=0.0).bind(draft.config)
    text = torch.randint(3, MASK, (20,), generator=torch.Generator().manual_seed(1))
    text[9] = 1  # not covered: no loss
    rows = objective.block_rows(text.numpy(), np.arange(20) >= 4, np.array([6, 15]))
    total = objective.loss(Models(draft, {"target": target}), pack_documents([rows])).total
    places, expected = torch.arange(20), torch.zeros(())
    states, captured = target.capture_layers(text, places, dense(causal=True), (0, 1))
    features = torch.cat([captured[0], captured[1]], -1)
    for anchor in (6, 15):
        ids = torch.tensor([text[anchor]] + [MASK] * (BLOCK - 1))
        hidden = draft(
            ids,
            anchor + torch.arange(BLOCK),
            dense(causal=False),
            context=(features[:anchor], places[:anchor]),
        )
        for k in range(1, min(BLOCK, 20 - anchor)):
            before = draft.previous_embedding.weight[text[anchor + k - 1]]
            logits = draft.unembedding.weight @ hidden[k] + draft.transition.weight @ before
            if (label := int(text[anchor + k])) in tokens:
                expected = expected - logits.log_softmax(0)[tokens.index(label)]
    close(total, expected)


def test_a_changed_head_keeps_the_transitions_to_its_tokens() -> None:
    target, fields = causal_model(), dspark(draft_vocab_size=6)
    source, draft = (weights.build_draft(fields, target, seed) for seed in (0, 1))
    weights.cover_tokens(source, torch.arange(1, 7))
    fresh = draft.transition.weight.clone()
    weights.cover_tokens(draft, torch.tensor([0, 2, 5, 7, 8, 9]), source)
    assert torch.equal(draft.transition.weight[1:3], source.transition.weight[[1, 4]])
    assert torch.equal(draft.transition.weight[[0, 3, 4, 5]], fresh[[0, 3, 4, 5]])
