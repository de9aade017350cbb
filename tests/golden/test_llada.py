"""Logits of the LLaDA authors' model code, and what its format may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import close, same_weights, save_tokenizer, whole
from outpace.checkpoints.load import load_model, load_tokenizer, save_model, translate_config
from outpace.models.transformer import Transformer

FOLDER = Path(__file__).parent / "llada"
CASES = json.loads((FOLDER / "cases.json").read_text())["logits"]
EXPECTED = load_file(FOLDER / "expected.safetensors")
CONFIG = json.loads((FOLDER / "model" / "config.json").read_text())


@pytest.mark.parametrize(
    "case", [c for c in CASES if "attention_mask" not in c], ids=lambda c: c["id"]
)
def test_logits_of_a_canvas(case: dict[str, Any]) -> None:
    model = load_model(FOLDER / case["model"])
    close(whole(model, case["input_ids"], causal=False), EXPECTED[case["id"]])
    assert (model.config.shift, model.config.mask_id, model.config.eos) == (0, 310, (300,))


def test_logits_of_a_padded_batch() -> None:
    (case,) = (c for c in CASES if "attention_mask" in c)
    model = load_model(FOLDER / case["model"])
    batch = zip(case["input_ids"], case["attention_mask"], EXPECTED[case["id"]], strict=True)
    for ids, mask, official in batch:
        first = mask.index(1)
        close(whole(model, ids[first:], causal=False), official[first:])
    assert len(CASES) == 7


@pytest.mark.parametrize("name", ["model", "model_gqa"])
def test_saved_model_has_the_published_names(name: str, tmp_path: Path) -> None:
    save_model(load_model(FOLDER / name), tmp_path, dtype=torch.float32)
    same_weights(tmp_path, FOLDER / name)


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    save_model(load_model(FOLDER / "model"), tmp_path, dtype=torch.float32)
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
    model = load_model(FOLDER / "model", dtype=torch.bfloat16)
    assert model.cos.dtype == torch.float32
    ids = CASES[2]["input_ids"]
    assert (whole(model, ids, causal=False) - EXPECTED[CASES[2]["id"]]).abs().mean() < 0.05


def test_biases_count_where_the_config_has_them(tmp_path: Path) -> None:
    model = Transformer(translate_config({**CONFIG, "include_qkv_bias": True}))
    model.load_state_dict(load_model(FOLDER / "model").state_dict(), strict=False)
    biases = [block.attention.qkv.bias for block in model.blocks]
    for bias in biases:
        torch.nn.init.zeros_(bias)
    ids, official = CASES[2]["input_ids"], EXPECTED[CASES[2]["id"]]
    close(whole(model, ids, causal=False), official)
    for bias in biases:
        torch.nn.init.normal_(bias)
    save_model(model, tmp_path, dtype=torch.float32)
    logits = whole(load_model(tmp_path), ids, causal=False)
    assert torch.equal(logits, whole(model, ids, causal=False))
    assert (logits - official).abs().max() > 0.01
    assert "model.transformer.blocks.1.k_proj.bias" in load_file(tmp_path / "model.safetensors")


def test_end_of_turn_ends_an_answer_too() -> None:
    sizes = {"vocab_size": 126464, "embedding_size": 126464, "eos_token_id": 126081}
    assert translate_config({**CONFIG, **sizes}).eos == (126081, 126348)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_type", "sequential", "block_type must be 'llama', got 'sequential'"),
        ("block_type", None, "'block_type' is missing"),
        ("block_group_size", 2, "block_group_size must be 1, got 2"),
        ("activation_type", "swiglu", "activation_type must be 'silu', got 'swiglu'"),
        ("layer_norm_type", "default", "layer_norm_type must be 'rms'"),
        ("rope", False, "rope must be True, got False"),
        ("alibi", True, "alibi is True, which is not supported; supported: LLaDA"),
        ("include_bias", True, "include_bias is True"),
        ("mask_token_id", None, "'mask_token_id' is missing"),
    ],
)
def test_what_only_others_of_the_format_have_is_refused(
    field: str, value: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        translate_config({**CONFIG, field: value})


def test_chat_is_the_published_one(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat=None)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi\n"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|startoftext|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
