"""Tests of training drafts of all kinds: falling loss, resuming, export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers import causal_model, published, published_eagle
from outpace.checkpoints.checkpoint import load_tokenizer, translate_config
from outpace.checkpoints.fingerprint import Fingerprint
from outpace.checkpoints.hub import ZOO_FOLDER
from outpace.checkpoints.load import load_draft
from outpace.models.draft import DFlashDraft, DFlashFusedDraft, DSparkDraft
from outpace.models.extending import EagleDraft
from outpace.training import weights
from outpace.training.draft_recipe import accepted_after, choose_layers
from outpace.training.objectives import MDLM, DFlash, Eagle3
from outpace.training.optim import Optim
from outpace.training.recipe import train_recipe
from outpace.training.trainer import Trainer
from runs import draft_trainer, losses, write_lines
from sharded import DRAFT, FUSED, SPARK

EAGLE = published_eagle(vocab_size=1024, draft_vocab_size=600)
UNLIKE = {
    "head_dim": 16,
    "intermediate_size": 40,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(
    ("config", "kind", "tied", "precision"),
    [
        (DRAFT, DFlashDraft, False, "no"),
        (FUSED, DFlashFusedDraft, False, "bf16"),
        (SPARK, DSparkDraft, False, "no"),
        (SPARK, DSparkDraft, True, "no"),
        (EAGLE, EagleDraft, False, "no"),
    ],
)
def test_draft_trains_resumes_and_is_exported(
    config: dict[str, Any], kind: type[torch.nn.Module], tied: bool, precision: str, tmp_path: Path
) -> None:
    objective = Eagle3(tokens=3) if kind is EagleDraft else DFlash(anchors=4)
    target = causal_model(vocab_size=1024, tie_word_embeddings=tied)
    untouched = {name: p.clone() for name, p in target.named_parameters()}

    def build(name: str, **options: Any) -> Trainer:
        options |= {"steps": 12, "precision": precision}
        return draft_trainer(tmp_path / name, config, objective, target, **options)

    build("whole").fit()
    build("halves", recompute=True).fit(6)
    run = build("halves", recompute=True)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.fit()
    whole = losses(tmp_path / "whole")
    assert whole == losses(tmp_path / "halves") and whole[-1] < 0.97 * whole[0]
    assert all(torch.equal(p, untouched[name]) for name, p in target.named_parameters())
    borrowed = {"embedding.weight", "unembedding.weight"} if kind is DSparkDraft else set()
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name in borrowed), name
    run.export(tmp_path / "export")
    loaded = load_draft(tmp_path / "export", target)
    assert type(loaded) is kind
    for name, parameter in loaded.named_parameters():
        ours = run.model.get_parameter(name)
        torch.testing.assert_close(parameter.float(), ours, atol=0, rtol=2**-8)  # bfloat16
    names = [*load_file(tmp_path / "export" / "model.safetensors")]
    if kind in (DFlashDraft, DFlashFusedDraft):
        assert not any("embed" in name or "head" in name for name in names)


def test_initial_draft_keeps_its_tables(tmp_path: Path) -> None:
    run = draft_trainer(tmp_path, SPARK, DFlash(anchors=4), steps=1)
    run.export(tmp_path / "export")
    target = run.loss_module.models.others["target"]
    again = weights.load_trained_draft(str(tmp_path / "export"), target)
    loaded = load_draft(tmp_path / "export", target)
    assert torch.equal(again.transition.weight, loaded.transition.weight)


def test_a_changed_draft_starts_from_weights_that_fit(tmp_path: Path) -> None:
    run = draft_trainer(tmp_path, EAGLE, Eagle3(tokens=2), steps=1)
    run.export(tmp_path / "export")
    target = run.loss_module.models.others["target"]
    source = weights.load_trained_draft(str(tmp_path / "export"), target)
    draft = weights.build_draft(EAGLE, target, 1, source)
    for name in draft.state_dict().keys() - weights.HEAD_STATE:
        assert torch.equal(draft.state_dict()[name], source.state_dict()[name]), name
    learnt, tokens = source.unembedding.weight, source.head_tokens
    fresh = next(token for token in range(1024) if token not in tokens)
    weights.cover_tokens(draft, torch.tensor([*tokens[1:], fresh]), source)
    assert draft.head_tokens.tolist() == [*tokens[1:], fresh]
    rows = draft.unembedding.weight
    assert torch.equal(rows[:-1], learnt[1:])
    theirs = weights.head_rows(target, tokens)
    fitted = torch.linalg.lstsq(theirs, learnt).solution
    assert (theirs @ fitted - learnt).norm() < (theirs - learnt).norm()
    torch.testing.assert_close(rows[-1:], weights.head_rows(target, torch.tensor([fresh])) @ fitted)
    deeper = causal_model(vocab_size=1024, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"no layer of init"):
        weights.build_draft(EAGLE | UNLIKE, deeper, 1, source)


def test_a_deeper_draft_starts_from_the_layers_that_fit(tmp_path: Path) -> None:
    run = draft_trainer(tmp_path, DRAFT, DFlash(anchors=4), steps=1)
    run.export(tmp_path / "export")
    target = run.loss_module.models.others["target"]
    source = weights.load_trained_draft(str(tmp_path / "export"), target)
    deeper = weights.build_draft(DRAFT | {"num_hidden_layers": 2}, target, 1, source)
    before, after = source.state_dict(), deeper.state_dict()
    assert before.keys() < after.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name
    for name in after.keys() - before.keys():
        assert after[name].any() != name.endswith(("attention.out.weight", "mlp.down.weight")), name
    rows = torch.randn(2, 4, source.config.dim, generator=torch.Generator().manual_seed(0))
    assert torch.equal(deeper.blocks[1].mlp(rows), torch.zeros_like(rows))


def test_what_a_number_of_answers_may_give() -> None:
    assert [accepted_after(n) for n in (0, 2400, 1e9)] == pytest.approx([1.81, 1.81, 4.13])
    assert 1.81 < accepted_after(5000) < accepted_after(12000) == pytest.approx(2.48)


def test_muon_leaves_heads_to_adamw() -> None:
    draft = weights.build_draft(SPARK, causal_model(vocab_size=1024), 0)
    weights.mark_trainable(draft)
    _, muon = Optim(optimizer="muon").build_optimizers(draft)
    own = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {name for name, parameter in draft.named_parameters() if id(parameter) in own}
    assert "fusion.weight" in names
    assert all(name.startswith(("fusion.", "blocks.")) for name in names)


def test_model_objective_and_target_must_fit(tmp_path: Path) -> None:
    common: dict[str, Any] = {"data": "story:train", "out": tmp_path, "tokenizer": "tiny-aux"}
    target = causal_model(vocab_size=1024)
    draft = weights.build_draft(DRAFT, target, 0)
    with pytest.raises(ValueError, match="^others"):
        Trainer(draft, DFlash(), **common)
    with pytest.raises(ValueError, match="^others"):
        Trainer(draft, MDLM(), others={"target": target}, **common)
    with pytest.raises(ValueError, match="^dflash"):
        Trainer(target, DFlash(), others={"target": target}, **common)
    with pytest.raises(ValueError, match="target"):
        weights.build_draft(published(), target, 0)
    assert translate_config(DRAFT).mask_id == 1021


RECIPE = f"""
[model]
target = "tiny-aux"
config = {json.dumps({**DRAFT, "hidden_size": 128, "num_target_layers": 4}).replace(": ", " = ")}
[objective]
name = "dflash"
anchors = 3
[data]
path = "story:train"
[train]
steps = 1
batch = 2
"""


def test_answers_of_another_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    data = tmp_path / "data.jsonl"
    own = Fingerprint.of("tiny-aux", load_tokenizer("tiny-aux"), {}).as_record()

    def train(*overrides: str, **changes: str) -> None:
        line = {"prompt": "One?", "response": "One and two.", "fingerprint": {**own, **changes}}
        write_lines(data, line)
        others = [f"out={tmp_path / 'out'}", f"path={data}", *overrides]
        train_recipe(tmp_path / "recipe.toml", others)

    with pytest.raises(ValueError, match="data.jsonl:1 .*target"):
        train(target="0")
    with pytest.raises(ValueError, match="target"):
        target = f"model.target={ZOO_FOLDER / 'tiny-aux'}"
        train_recipe(tmp_path / "recipe.toml", [f"path={data}", target])
    accepted = "data.other_target=true"
    with pytest.raises(ValueError, match="tokenizer and template"):
        train(accepted, target="0", tokenizer="0", template="0")
    with pytest.raises(ValueError, match="template"):
        train('data.template={ style = "short" }')
    train(accepted, target="0")
    train("out=" + str(tmp_path / "own"))


def test_a_draft_reads_layers_that_its_target_has() -> None:
    chosen = {count: choose_layers(count) for count in range(1, 40)}
    assert all(0 <= layers[0] <= layers[-1] < count for count, layers in chosen.items())
