"""Tests of the DFlash objective against the published trainer."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from helpers import adding_draft
from helpers import dense as dense_attention
from outpace.checkpoints.load import load_draft, load_model
from outpace.models.config import EMBEDDINGS, AttentionWindow
from outpace.training.data import Example
from outpace.training.objective import Loss, Models
from outpace.training.objectives import DFlash
from outpace.training.optim import Optim
from outpace.training.rows import Rows, pack_documents
from runs import attend_where

GOLDEN = Path(__file__).parent.parent / "golden" / "dflash"


class Pair:
    def __init__(self, name: str, **options: Any) -> None:
        folder = GOLDEN / name
        self.facts = json.loads((folder / "training.json").read_text())
        self.tensors = load_file(folder / "training.safetensors")
        target = load_model(folder / "target")
        self.draft = load_draft(folder / "draft", target).train().requires_grad_(True)
        self.models = Models(self.draft, {"target": target})
        options = {"gamma": self.facts["gamma"], **options}
        self.objective = DFlash(**options).bind(self.draft.config)
        self.kept = self.tensors["keep"].numpy()

    def parts(self) -> list[Rows]:
        """The sequences of the batch; they are equally long, but one has a block fewer."""
        return [
            self.objective.block_rows(ids, mask.astype(bool), anchors[kept])
            for ids, mask, anchors, kept in zip(
                *(self.tensors[name].numpy() for name in ("input_ids", "loss_mask", "anchors")),
                self.kept,
                strict=True,
            )
        ]

    def loss(self) -> tuple[Loss, float]:
        rows = pack_documents(self.parts())
        return self.objective.loss(self.models, rows), rows.normaliser

    def published(self) -> dict[str, Tensor]:
        """Gradients under published names; stacked ones by the first of them."""
        names = {"fusion": "fc", "fusion_norm": "hidden_norm", "norm": "norm"}
        grads = {
            f"{theirs}.weight": self.draft.get_parameter(f"{ours}.weight").grad
            for ours, theirs in names.items()
        }
        for number, block in enumerate(self.draft.blocks):
            own = f"layers.{number}."
            attention, sizes = block.attention, (block.attention.heads, block.attention.kv_heads)
            parts = attention.qkv.weight.grad.split(
                [n * self.draft.config.head_dim for n in (*sizes, sizes[1])]
            )
            grads |= {
                f"{own}self_attn.{name}_proj.weight": part
                for name, part in zip("qkv", parts, strict=True)
            }
            grads[f"{own}self_attn.o_proj.weight"] = attention.out.weight.grad
            grads[f"{own}self_attn.q_norm.weight"] = attention.q_norm.weight.grad
            grads[f"{own}self_attn.k_norm.weight"] = attention.k_norm.weight.grad
            gate, up = block.mlp.gate_up.weight.grad.chunk(2)
            grads[f"{own}mlp.gate_proj.weight"], grads[f"{own}mlp.up_proj.weight"] = gate, up
            grads[f"{own}mlp.down_proj.weight"] = block.mlp.down.weight.grad
            grads[f"{own}input_layernorm.weight"] = block.attention_norm.weight.grad
            grads[f"{own}post_attention_layernorm.weight"] = block.mlp_norm.weight.grad
        return grads


@pytest.fixture(params=["pair_a", "pair_b"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_rows_are_those_of_the_published_trainer(name: str) -> None:
    pair = Pair(name)
    tensors, size = pair.tensors, pair.draft.config.block
    for row, rows in enumerate(pair.parts()):
        keep = tensors["keep"][row].repeat_interleave(size)
        total = tensors["input_ids"].shape[1]
        assert torch.equal(rows.ids[:total], tensors["input_ids"][row])
        assert torch.equal(rows.ids[total:], tensors["noise_ids"][row][keep])
        assert torch.equal(rows.positions[total:], tensors["position_ids"][row, total:][keep])
        torch.testing.assert_close(rows.weights[total:], tensors["weights"][row].flatten()[keep])
        assert torch.equal(rows.labels[total:] >= 0, rows.weights[total:] > 0)
    assert sum(rows.normaliser for rows in pair.parts()) == pytest.approx(
        pair.facts["decay"]["loss_den"]
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [("decay", {}), ("uniform", {"gamma": 0.0}), ("dpace", {"dpace": True, "alpha": 0.5})],
)
def test_losses_and_gradients(name: str, kind: str, options: dict[str, Any]) -> None:
    pair = Pair(name, **options)
    facts = pair.facts[kind]
    loss, mass = pair.loss()
    assert mass == pytest.approx(facts["loss_den"], rel=1e-5)
    assert loss.total.item() == pytest.approx(facts["loss_num"], rel=1e-5)
    hits, count = loss.metrics["accuracy"]
    assert (float(hits / count), float(count)) == pytest.approx(
        (facts["accuracy"], facts["accuracy_denom"])
    )
    (loss.total / mass).backward()
    grads = pair.published()
    assert {n: float(g.norm()) for n, g in grads.items()} == pytest.approx(
        facts["grad_norms"], rel=1e-4
    )
    for key, official in pair.tensors.items():
        if kind == "decay" and key.startswith("grad."):
            ours = grads[key.removeprefix("grad.")]
            torch.testing.assert_close(ours, official, atol=2e-5, rtol=1e-4)


def test_loss_with_a_sliding_layer() -> None:
    pair = Pair("pair_a")
    windows = (AttentionWindow(window=6, causal=True), AttentionWindow())
    pair.draft.config = replace(pair.draft.config, windows=windows)
    loss, mass = pair.loss()
    facts = pair.facts["sliding_first_layer_w6"]
    assert loss.total.item() / mass == pytest.approx(facts["loss"], rel=1e-5)


class Adding(Pair):
    """A golden pair with a draft of the same weights that adds features."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self.draft = adding_draft(self.draft).train().requires_grad_(True)
        self.models = Models(self.draft, self.models.others)
        self.objective = self.objective.bind(self.draft.config)

    def by_hand(self) -> Tensor:
        """The loss, from a separate forward of each block after the text before it."""
        total = torch.zeros(())
        for rows in self.parts():
            size, target = self.objective.block, self.models.others["target"]
            length = len(rows) - int((rows.ranges[:, 1, 1] > 0).sum())
            text, layers = rows.ids[:length], self.draft.config.feature_layers
            with torch.no_grad():
                _, captured = target.capture_layers(
                    text, torch.arange(length), dense_attention(causal=True), layers
                )
            features = torch.cat([captured[layer] for layer in layers], -1)
            for begin in range(length, len(rows), size):
                anchor = int(rows.positions[begin])
                ids = torch.cat((text[:anchor], rows.ids[begin : begin + size]))
                seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
                seen[anchor:] = True
                hidden = self.draft.embed_tokens(ids)
                added = self.draft.feature_norm(self.draft.fusion(features[:anchor]))
                hidden = torch.cat((hidden[:anchor] + added, hidden[anchor:]))
                places = torch.cat((torch.arange(anchor), rows.positions[begin : begin + size]))
                turn = self.draft.rotary_angles(places, hidden.dtype)
                for each in self.draft.blocks:
                    hidden = each(hidden, *turn, attend_where(seen))
                logits = target.compute_logits(self.draft.norm(hidden[anchor:]))
                labels = rows.labels[begin : begin + size].clamp(min=0)
                losses = F.cross_entropy(logits, labels, reduction="none")
                total = total + (losses * rows.weights[begin : begin + size]).sum()
        return total


def test_a_draft_that_adds_features_learns_what_it_decodes(name: str) -> None:
    ours, plain = Adding(name), Adding(name)
    loss, _ = ours.loss()
    expected = plain.by_hand()
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.total.backward()
    expected.backward()
    for key, parameter in ours.draft.named_parameters():
        theirs = plain.draft.get_parameter(key).grad
        assert theirs is not None and theirs.abs().max() > 0, key
        torch.testing.assert_close(parameter.grad, theirs, atol=2e-4, rtol=1e-4)
    assert ours.loss()[0].total.item() != pytest.approx(Pair(name).loss()[0].total.item(), rel=1e-3)


NARROW = AttentionWindow(window=3, causal=True), AttentionWindow()
WITHOUT = EMBEDDINGS, EMBEDDINGS


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"dpace": True}, {}),
        ({"divergence": True}, {}),
        ({}, {"feature_layers": WITHOUT}),
        ({}, {"windows": NARROW}),
    ],
)
def test_options_hold_for_a_draft_that_adds_features(
    options: dict[str, Any], fields: dict[str, Any]
) -> None:
    plain, other = Adding("pair_a"), Adding("pair_a", **options)
    other.draft.config = replace(other.draft.config, **fields)
    loss = other.loss()[0].total
    loss.backward()
    assert loss.isfinite() and loss.item() != plain.loss()[0].total.item()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in other.draft.parameters())


def test_ten_steps_of_the_optimizer(name: str) -> None:
    pair = Pair(name)
    (optimizer,) = Optim(optimizer="adamw", betas=(0.9, 0.999), weight_decay=0).build_optimizers(
        pair.draft
    )
    for facts in pair.facts["optimizer"]["steps"]:
        loss, mass = pair.loss()
        assert loss.total.item() / mass == pytest.approx(facts["loss"], rel=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = facts["lr"]
        (loss.total / mass).backward()
        norm = torch.nn.utils.clip_grad_norm_(pair.draft.parameters(), 1.0)
        assert float(norm) == pytest.approx(facts["grad_norm"], rel=1e-3)
        optimizer.step()
        optimizer.zero_grad()
    for parameter, key in ((pair.draft.fusion, "fc"), (pair.draft.norm, "norm")):
        official = pair.tensors[f"after10.{key}.weight"]
        torch.testing.assert_close(parameter.weight, official, atol=2e-5, rtol=1e-3)


def bound(**options: Any) -> DFlash:
    return Pair("pair_b", gamma=None, **options).objective


def example(prompt: int, response: int) -> Example:
    ids = list(range(prompt + response))
    return Example(ids[:prompt], ids[prompt:], [False] * response)


def anchors(rows: Rows, size: int = 5) -> list[int]:
    return rows.positions[rows.ranges[:, 1, 1] > 0].view(-1, size)[:, 0].tolist()


def test_anchors_are_drawn_anew_from_the_response() -> None:
    objective, rng = bound(anchors=4), default_rng(0)
    draws = [anchors(objective.rows(example(7, 9), rng)) for _ in range(200)]
    assert all(len(set(draw)) == 4 and draw == sorted(draw) for draw in draws)
    assert {anchor for draw in draws for anchor in draw} == set(range(7, 15))
    again = anchors(objective.rows(example(7, 9), default_rng(0)))
    assert again == draws[0] != draws[1]


def test_fixed_blocks_are_adjacent_and_end_with_the_draft() -> None:
    objective = bound(fixed=True)
    assert anchors(objective.rows(example(7, 12), default_rng(0))) == [7, 12, 17]
    rows = replace(objective, length=10).block_rows(np.arange(10), np.arange(10) > 2, np.array([7]))
    assert rows.positions[10:].tolist() == [7, 8, 9, 9, 9]
    assert (rows.labels[10:] >= 0).tolist() == [False, True, True, False, False]


def test_blocks_of_random_lengths_see_no_row_after_their_end() -> None:
    rows = bound(anchors=40, shortest=2).rows(example(7, 60), default_rng(0))
    begin, end = rows.ranges[67:, 1].view(-1, 5, 2).unbind(2)
    lengths = (end - begin)[:, 0]
    assert set(lengths.tolist()) == {2, 3, 4, 5}
    assert torch.equal(end - begin, lengths[:, None].expand(-1, 5))
    rest = 66 - torch.tensor(anchors(rows))
    labels = (rows.labels[67:] >= 0).view(-1, 5).sum(1)
    assert torch.equal(labels, torch.minimum(lengths - 1, rest))
    for length in (1, 6):
        with pytest.raises(ValueError, match="shortest"):
            bound(shortest=length)
    pair = Pair("pair_b")
    text = np.arange(20), np.arange(20) > 3, np.array([4, 9])
    whole, short = pair.objective, replace(pair.objective, block=3)
    expected = short.loss(pair.models, short.block_rows(*text)).total
    found = whole.loss(pair.models, whole.block_rows(*text, np.array([3, 3]))).total
    torch.testing.assert_close(found, expected)


def test_weights_fall_by_block_size() -> None:
    gammas = {}
    for size in (4, 8, 9, 10, 16, 32):
        draft = replace(Pair("pair_b").draft.config, block=size)
        gammas[size] = DFlash().bind(draft).gamma
    assert gammas == {4: 2.0, 8: 4.0, 9: 4.5, 10: 5.0, 16: 7.0, 32: 7.0}
    rows = bound(anchors=1).rows(example(1, 3), default_rng(3))
    (anchor,) = anchors(rows)
    expected = [0, *[math.exp(-k / 2.5) * (anchor + k + 1 < 4) for k in range(4)]]
    assert rows.weights[4:].tolist() == pytest.approx(expected)


def test_divergence_is_that_of_the_target() -> None:
    pair = Pair("pair_a", divergence=True)
    rows = pair.parts()[0]
    loss = pair.objective.loss(pair.models, rows)
    total, size = pair.tensors["input_ids"].shape[1], pair.draft.config.block
    target = pair.models.others["target"]
    attend = attend_where(torch.ones(total, total, dtype=torch.bool).tril())
    with torch.no_grad():
        theirs = target.compute_logits(target(rows.ids[:total], rows.positions[:total], attend))
    ours = pair.tensors["logits_row0"].view(2, size, -1)  # of the first two blocks
    expected = 0.0
    for block, anchor in enumerate(pair.tensors["anchors"][0][:2].tolist()):
        for step in range(1, size):
            p, q = theirs[anchor + step - 1].softmax(0), ours[block, step].softmax(0)
            weight = rows.weights[total + block * size + step]
            expected += float(weight * (p * (p / q).log()).sum())
    rows.weights[total + 2 * size :] = 0
    assert pair.objective.loss(pair.models, rows).total.item() == pytest.approx(expected, rel=1e-4)
    assert loss.total.item() > expected > 0


def test_without_features_the_draft_reads_tokens_only() -> None:
    with_features, without = Pair("pair_a"), Pair("pair_a")
    without.draft.config = replace(without.draft.config, feature_layers=WITHOUT)
    before = [pair.loss()[0].total.item() for pair in (with_features, without)]
    for pair in (with_features, without):
        with torch.no_grad():
            pair.models.others["target"].blocks[0].mlp.down.weight.mul_(2)
    after = [pair.loss()[0].total.item() for pair in (with_features, without)]
    assert before[0] != after[0] and before[1] == after[1] != before[0]
    rows = without.parts()[0]
    changed = rows.ids.clone()
    changed[2] += 1  # a token of the prompt
    losses = [
        without.objective.loss(without.models, replace(rows, ids=ids)).total.item()
        for ids in (rows.ids, changed)
    ]
    assert losses[0] != losses[1]
