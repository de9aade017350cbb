"""Tests of low-rank updates: trained weights, initial values, export."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import causal_model, published, random_model, whole
from outpace import LLM
from outpace.checkpoints.adapter import ADAPTER_CONFIG, Adapter
from outpace.checkpoints.hub import ZOO_FOLDER
from outpace.checkpoints.load import load_model, save_model
from outpace.training import checkpoint, lora
from outpace.training.lora import LoRA
from outpace.training.objectives import D2F
from outpace.training.recipe import load_recipe
from outpace.training.trainer import Trainer
from runs import same_tensors

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def test_attention_is_adapted_by_default_and_nothing_else_is_trained() -> None:
    model = lora.attach_adapter(causal_model(), LoRA(rank=2))
    leaves = {lora.matrix_name(name) for name in lora.collect_updates(model)}
    assert leaves == {"q_proj", "k_proj", "v_proj", "o_proj"}
    trained = checkpoint.trainable_parameters(model)
    assert len(trained) == 2 * 4 * 2
    assert all(name.endswith((".down", ".up")) for name in trained)


def test_targets_choose_parts_of_a_fused_matrix() -> None:
    model = lora.attach_adapter(
        causal_model(), LoRA(rank=2, alpha=6, targets=("v_proj", "up_proj"))
    )
    assert {lora.matrix_name(name) for name in lora.collect_updates(model)} == {"v_proj", "up_proj"}
    x, qkv = torch.randn(5, 32), model.blocks[0].attention.qkv
    (update,) = qkv.updates.values()
    torch.nn.init.normal_(update.up)
    changed = (qkv(x) - qkv.linear(x)).detach()
    assert torch.equal(changed[:, :48], torch.zeros(5, 48))
    delta = 3 * x @ update.down.T @ update.up.T
    assert torch.allclose(changed[:, 48:], delta, atol=1e-5)


def test_dropout_is_for_training_alone() -> None:
    model = lora.attach_adapter(causal_model(), LoRA(rank=2, dropout=0.5))
    for update in lora.collect_updates(model).values():
        torch.nn.init.normal_(update.up)
    one, two = (whole(model.eval(), IDS, causal=True) for _ in range(2))
    assert torch.equal(one, two)
    model.train()
    assert not torch.equal(whole(model, IDS, causal=True), whole(model, IDS, causal=True))


def run(out: Path, base: Path, **options: object) -> Trainer:
    defaults = {"lr": 1e-2, "warmup": 0, "batch": 2, "steps": 4, "log_every": 1, "save_every": 2}
    return Trainer(
        str(base),
        D2F(block=8),
        data="story:train",
        out=out,
        tokenizer=ZOO_FOLDER / "vocabulary",
        **{"adapter": LoRA(rank=2, alpha=4), **defaults, **options},
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    config = published("DreamModel", vocab_size=1024, mask_token_id=1021)
    save_model(random_model(config, std=0.1), tmp_path / "base", dtype=torch.float32)
    return tmp_path / "base"


def test_teacher_is_the_base_and_shares_its_weights(tmp_path: Path, base: Path) -> None:
    trainer = run(tmp_path / "out", base)
    teacher = trainer.loss_module.models.others["teacher"]
    assert teacher.embedding.weight is trainer.model.embedding.weight
    assert isinstance(teacher.blocks[0].attention.qkv, torch.nn.Linear)
    before = whole(teacher, IDS, causal=False)
    assert torch.allclose(before, whole(load_model(base), IDS, causal=False), atol=1e-4)
    trainer.fit()
    assert torch.equal(whole(teacher, IDS, causal=False), before)
    assert not torch.allclose(whole(trainer.model.eval(), IDS, causal=False), before)


def test_export_is_an_adapter_of_the_base(tmp_path: Path, base: Path) -> None:
    trainer = run(tmp_path / "out", base)
    trainer.fit()
    trainer.export(tmp_path / "export")
    merged = load_model(base, adapter=tmp_path / "export")
    ours, theirs = (whole(m, IDS, causal=False) for m in (merged, trainer.model.eval()))
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert not torch.allclose(ours, whole(load_model(base), IDS, causal=False), atol=1e-2)
    config = json.loads((tmp_path / "export" / ADAPTER_CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4)
    assert config["base_model_name_or_path"] == str(base)
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert len(Adapter(tmp_path / "export").updates) == 8


def test_an_adapter_is_trained_further_and_taught_by_its_start(tmp_path: Path, base: Path) -> None:
    first = run(tmp_path / "first", base)
    first.fit()
    first.export(tmp_path / "half")
    given = str(tmp_path / "half")
    further = run(tmp_path / "out", base, adapter=LoRA(rank=2, alpha=8, init=given))
    teacher = further.loss_module.models.others["teacher"]
    start = whole(load_model(base, adapter=given), IDS, causal=False)
    assert not any(weight.requires_grad for weight in teacher.parameters())
    for model in (teacher, further.model):
        assert torch.allclose(whole(model, IDS, causal=False), start, atol=1e-4)
    further.fit()
    assert torch.allclose(whole(teacher, IDS, causal=False), start, atol=1e-4)
    assert not torch.allclose(whole(further.model.eval(), IDS, causal=False), start, atol=1e-3)
    with pytest.raises(ValueError, match=r"has rank 2; set rank to it, not to 3"):
        run(tmp_path / "a", base, adapter=LoRA(rank=3, init=given))
    with pytest.raises(ValueError, match=r"updates other matrices, such as .*set targets to k_pr"):
        run(tmp_path / "b", base, adapter=LoRA(rank=2, targets=("v_proj",), init=given))


ADAPTED = """
[model]
init = "tiny-ar"
dtype = "bfloat16"
config = {architectures = ["WeDLMForCausalLM"], model_type = "wedlm", mask_token_id = 1021}
[adapter]
rank = 2
[objective]
name = "wedlm"
block = 4
[data]
path = "story:train"
[train]
steps = 1
batch = 1
precision = "bf16"
"""


def test_an_export_has_the_changes_and_number_format_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(ADAPTED)
    trainer = load_recipe(tmp_path / "mine.toml", [f"out={tmp_path / 'out'}"]).build_trainer()
    trainer.fit()
    trainer.export(tmp_path / "export")
    updates = Adapter(tmp_path / "export").updates.values()
    assert {each.down.dtype for each in updates} == {torch.bfloat16}
    assert LLM("tiny-ar", adapter=tmp_path / "export").config.mask_id == 1021


def test_an_adapter_of_a_base_that_lost_its_shift_has_no_decoder(tmp_path: Path) -> None:
    other = ['model.config.architectures=["A2DQwen2LMHeadModel"]', "objective.name=mdlm"]
    other += ["model.config.model_type=a2d-qwen2", f"out={tmp_path / 'out'}"]
    (tmp_path / "mine.toml").write_text(ADAPTED.replace("block = 4\n", ""))
    trainer = load_recipe(tmp_path / "mine.toml", other).build_trainer()
    assert trainer.build_decoder({}) is None


def test_checkpoint_has_the_updates_alone(tmp_path: Path, base: Path) -> None:
    for name in ("whole", "halves"):
        run(tmp_path / name, base).fit()
    shutil.rmtree(tmp_path / "halves" / "checkpoints" / "step-00000004")
    run(tmp_path / "halves", base).fit()
    whole, halves = (
        load_file(tmp_path / name / "checkpoints" / "step-00000004" / checkpoint.MODEL_FILE)
        for name in ("whole", "halves")
    )
    assert len(whole) == 16 and same_tensors(halves, whole)
