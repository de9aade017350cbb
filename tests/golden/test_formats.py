"""What the formats of LLaDA and WeDLM may contain, read and written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import GOLDEN, close, published, same_weights, save_tokenizer, whole
from outpace.api.rendering import render_chat
from outpace.checkpoints.checkpoint import load_tokenizer, translate_config
from outpace.checkpoints.load import load_model, save_model
from outpace.decoding import Kind
from outpace.models.transformer import Transformer
from refusal import refuses

LLADA, WEDLM = GOLDEN / "llada", GOLDEN / "wedlm"
CONFIG = json.loads((LLADA / "model" / "config.json").read_text())
CASE = json.loads((LLADA / "cases.json").read_text())["logits"][2]
OFFICIAL = load_file(LLADA / "expected.safetensors")[CASE["id"]]


@pytest.mark.parametrize(
    "folder", [LLADA / "model", LLADA / "model_gqa", WEDLM / "qwen3", WEDLM / "qwen25"]
)
def test_saved_model_has_the_published_names(folder: Path, tmp_path: Path) -> None:
    save_model(load_model(folder), tmp_path, dtype=torch.float32)
    same_weights(tmp_path, folder)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "auto_map" in saved or folder.parent != WEDLM


def test_llada_models_predict_their_own_slots() -> None:
    config = load_model(LLADA / "model").config
    assert (config.shift, config.mask_id, config.eos) == (0, 310, (300,))


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    save_model(load_model(LLADA / "model"), tmp_path, dtype=torch.float32)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "weight_tying": True}))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.transformer.ff_out.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    assert model.unembedding is None
    assert torch.equal(model.compute_logits(torch.eye(64)), model.embedding.weight.T)


@pytest.mark.parametrize("exact", [True, False])
def test_rotation_is_in_float32_where_the_config_says_so(exact: bool) -> None:
    config = translate_config({**CONFIG, "rope_full_precision": exact})
    assert config.rope.float32 is exact
    model = load_model(LLADA / "model", dtype=torch.bfloat16)
    assert model.cos.dtype == torch.float32
    assert (whole(model, CASE["input_ids"], causal=False) - OFFICIAL).abs().mean() < 0.05


def test_biases_count_where_the_config_has_them(tmp_path: Path) -> None:
    model = Transformer(translate_config({**CONFIG, "include_qkv_bias": True}))
    model.load_state_dict(load_model(LLADA / "model").state_dict(), strict=False)
    biases = [block.attention.qkv.bias for block in model.blocks]
    for bias in biases:
        torch.nn.init.zeros_(bias)
    ids = CASE["input_ids"]
    close(whole(model, ids, causal=False), OFFICIAL)
    for bias in biases:
        torch.nn.init.normal_(bias)
    save_model(model, tmp_path, dtype=torch.float32)
    logits = whole(load_model(tmp_path), ids, causal=False)
    assert torch.equal(logits, whole(model, ids, causal=False))
    assert (logits - OFFICIAL).abs().max() > 0.01
    assert "model.transformer.blocks.1.k_proj.bias" in load_file(tmp_path / "model.safetensors")


def test_end_of_turn_ends_an_answer_too() -> None:
    sizes = {"vocab_size": 126464, "embedding_size": 126464, "eos_token_id": 126081}
    assert translate_config({**CONFIG, **sizes}).eos == (126081, 126348)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_type", "sequential"),
        ("block_type", None),
        ("block_group_size", 2),
        ("activation_type", "swiglu"),
        ("layer_norm_type", "default"),
        ("rope", False),
        ("alibi", True),
        ("include_bias", True),
        ("mask_token_id", None),
    ],
)
def test_other_variants_of_llada_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        translate_config({**CONFIG, field: value})


def test_chat_is_the_published_one(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat=None)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi\n"}]
    text = render_chat(tokenizer, messages)
    assert text == (
        "<|startoftext|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def config(**fields: Any) -> dict[str, Any]:
    return published("WeDLMForCausalLM", **fields)


@pytest.mark.parametrize(
    ("fields", "bias", "norm"),
    [
        ({}, True, False),
        ({"attention_bias": False}, False, True),
        ({"attention_bias": False, "qk_norm": False}, False, False),
        ({"attention_bias": True, "qk_norm": True}, True, True),
    ],
)
def test_queries_are_normed_where_they_have_no_bias(
    fields: dict[str, bool], bias: bool, norm: bool
) -> None:
    ours = translate_config(config(**fields))
    assert (ours.qkv_bias, ours.qk_norm, ours.out_bias) == (bias, norm, False)
    assert (ours.shift, ours.kind) == (1, Kind.causal_kind(ours.mask_id))


def test_head_size_is_what_it_says() -> None:
    assert translate_config(config(head_dim=24)).head_dim == 24
    assert translate_config(config(head_dim=None)).head_dim == 8


def test_mask_is_the_named_token_or_that_of_the_published_models(tmp_path: Path) -> None:
    assert translate_config(config(mask_token_id=5)).mask_id == 5
    assert translate_config(config(vocab_size=151936)).mask_id == 151665
    assert translate_config(config()).mask_id is None
    folder = WEDLM / "qwen3"
    assert load_model(folder).config.mask_id == 319
    assert load_model(folder, mask_id=7).config.mask_id == 7
    with refuses("mask_id"):
        load_model(folder, mask_id=400)


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="use_sliding_window"):
        translate_config(config(use_sliding_window=True))
