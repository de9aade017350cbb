"""int8 checkpoints: equal to quantizing while loading, and written atomically."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from helpers import (
    VOCAB,
    causal_model,
    extending_draft,
    feature_draft,
    published,
    random_model,
    save_tokenizer,
    whole,
)
from outpace import LLM
from outpace.checkpoints import compress as module
from outpace.checkpoints import fill
from outpace.checkpoints.adapter import LowRank, save_adapter
from outpace.checkpoints.compress import compress_checkpoint
from outpace.checkpoints.hub import CONFIG_FILE
from outpace.checkpoints.load import load_config, load_draft, load_model, save_model
from outpace.checkpoints.quantised import QUANTIZATION_FIELD
from outpace.errors import OptionError
from outpace.models import int8
from outpace.models.draft import Draft
from outpace.models.int8 import Int8Linear, has_int8_products, is_quantized
from outpace.models.transformer import Transformer

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"
IDS = [1, 2, 3, 4]
needs_products = pytest.mark.skipif(
    not has_int8_products(), reason="this machine has no products of 8 bits"
)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = random_model(published(tie_word_embeddings=request.param, vocab_size=260))
    save_model(model, tmp_path / "plain")
    save_tokenizer(tmp_path / "plain")
    return tmp_path / "plain"


def logits(model: Transformer) -> torch.Tensor:
    return whole(model, IDS, causal=True)


@needs_products
def test_a_written_model_equals_one_quantized_on_load(plain: Path) -> None:
    folder = compress_checkpoint(plain, plain.parent / "small")
    direct = load_model(plain, quantize="int8")
    for quantize in (None, "int8"):
        again = load_model(folder, quantize=quantize)
        assert is_quantized(again) and torch.equal(logits(again), logits(direct))
    prompts, options = ["hello", "you there"], {"max_tokens": 12, "raw": True}
    outputs = [
        llm.generate(prompts, **options) for llm in (LLM(folder), LLM(plain, quantize="int8"))
    ]
    assert [output.ids for output in outputs[0]] == [output.ids for output in outputs[1]]
    assert load_config(folder) == load_config(plain)


def test_a_written_model_has_the_published_format(plain: Path) -> None:
    folder = compress_checkpoint(plain, plain.parent / "small")
    tensors, before = load_file(folder / FILE), load_file(plain / FILE)
    matrices = {name for name, tensor in before.items() if tensor.dim() == 2}
    assert {name for name, tensor in tensors.items() if tensor.dtype == torch.int8} == matrices
    assert tensors.keys() == before.keys() | {f"{name}_scale" for name in matrices}
    assert tensors[f"{DOWN}_scale"].shape == (32, 1)
    codes, scale = tensors[DOWN].float(), tensors[f"{DOWN}_scale"]
    assert ((codes * scale - before[DOWN].float()).abs() <= scale * 0.501).all()
    config = json.loads((folder / CONFIG_FILE).read_text())
    assert config[QUANTIZATION_FIELD]["format"] == "int-quantized"
    assert config[QUANTIZATION_FIELD]["ignore"] == (
        ["lm_head"] if config["tie_word_embeddings"] else []
    )
    assert (folder / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()
    assert not list(plain.parent.glob(".*"))


@needs_products
@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_a_written_draft_equals_one_quantized_on_load(kind: str, tmp_path: Path) -> None:
    target = causal_model()
    save_model(target, tmp_path / "target", dtype=torch.float32)
    if kind == "eagle3":
        own: Draft = extending_draft(target, vocab_size=VOCAB, draft_vocab_size=10)
        own.set_head_tokens(torch.arange(3, 23, 2))
    else:
        own = feature_draft(target)
    plain, small = tmp_path / "plain", tmp_path / "small"
    save_model(own, plain, dtype=torch.float32)
    copy = {"embed_tokens.weight": target.embedding.weight.clone()}
    save_file({**load_file(plain / FILE), **copy}, plain / FILE)
    compress_checkpoint(plain, small, target=tmp_path / "target")
    assert "embed_tokens.weight" not in load_file(small / FILE)
    found, wanted = load_draft(small, target), load_draft(plain, target, quantize="int8")
    assert isinstance(found.fusion, Int8Linear)
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("tiny-dflash", None),
        ("tiny-ar", "tiny-ar"),
        ("tiny-dflash", "tiny-eagle"),
        ("tiny-dflash", "x"),
    ],
)
def test_a_draft_needs_its_target_and_only_a_draft(
    name: str, target: str | None, tmp_path: Path
) -> None:
    with pytest.raises(OptionError) as caught:
        compress_checkpoint(name, tmp_path / "small", target=target)
    assert caught.value.param == "target"
    assert not (tmp_path / "small").exists()


@needs_products
def test_stored_codes_are_kept(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = compress_checkpoint(plain, plain.parent / "small")
    change = {f"{DOWN}_scale": load_file(folder / FILE)[f"{DOWN}_scale"] * 1.01}
    save_file({**load_file(folder / FILE), **change}, folder / FILE)

    def refuse(*args: object) -> None:
        raise AssertionError("quantised once more")

    monkeypatch.setattr(int8, "quantize_weight", refuse)
    layer = load_model(folder, quantize="int8").blocks[1].mlp.down
    assert isinstance(layer, Int8Linear)
    assert torch.equal(layer.scale, change[f"{DOWN}_scale"].flatten())


@needs_products
def test_an_update_is_added_to_dequantized_matrices(plain: Path) -> None:
    folder = compress_checkpoint(plain, plain.parent / "small")
    update = {DOWN: LowRank(torch.ones(1, 48), torch.ones(32, 1), 1.0)}
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["down_proj"]}
    save_adapter(plain.parent / "lora", update, config)
    model = load_model(folder, adapter=plain.parent / "lora")
    before = load_model(folder, plain=True)
    assert not isinstance(model.blocks[1].mlp.down, Int8Linear)
    assert isinstance(model.blocks[0].mlp.down, Int8Linear)
    torch.testing.assert_close(
        model.blocks[1].mlp.down.weight, before.blocks[1].mlp.down.weight + 1
    )


def test_without_products_or_for_training_it_is_dequantized(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compress_checkpoint(plain, plain.parent / "small")
    tensors = load_file(folder / FILE)
    wanted = tensors[DOWN].float() * tensors[f"{DOWN}_scale"]
    assert torch.equal(load_model(folder, plain=True).blocks[1].mlp.down.weight, wanted)
    monkeypatch.setattr(fill, "has_int8_products", lambda: False)
    model = load_model(folder, dtype=torch.bfloat16)
    assert torch.equal(model.blocks[1].mlp.down.weight, wanted.bfloat16())


def test_invalid_models_and_folders_are_refused(plain: Path, tmp_path: Path) -> None:
    folder = compress_checkpoint(plain, tmp_path / "small")
    (tmp_path / "file").write_text("")
    new = tmp_path / "new"
    for source, out, options, token in (
        (folder, new, {}, "small"),
        (plain, folder, {}, "small"),
        (plain, tmp_path / "file", {}, "file"),
        (plain, tmp_path / "file" / "in it", {}, "in it"),
        ("tiny-dflash", new, {"target": plain}, "target"),
    ):
        with pytest.raises(ValueError, match=token):
            compress_checkpoint(source, out, **options)
        assert not new.exists()
    (tmp_path / "empty").mkdir()
    load_model(compress_checkpoint(plain, tmp_path / "empty"))


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("no space")])
def test_a_full_disk_leaves_nothing(
    error: Exception, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(module, "save_file", fail)
    with pytest.raises(ValueError, match="small"):
        compress_checkpoint(plain, plain.parent / "small")
    assert [path.name for path in plain.parent.iterdir()] == ["plain"]
