"""Compare bidirectional diffusion families with transformers models without a causal mask.

A2D is Qwen2.5 or Qwen3 and LLaDA-MoE is Qwen3-MoE under other names. Dream and LLaDA are compared
with their authors' code, in `tests/golden`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import naive
from disguised import IDS, MASK, SIZES, Disguise, build_random, reference, reference_without_mask
from helpers import close, whole
from outpace import LLM
from outpace.checkpoints.families.omitted import OMITTED
from outpace.checkpoints.load import load_config, load_model, save_model
from outpace.decoding import Kind
from outpace.methods import Diffusion

DENSE = {**SIZES, "num_hidden_layers": 2}
SPARSE = {name: size for name, size in DENSE.items() if name != "intermediate_size"}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
A2D_QWEN2 = {"architectures": ["A2DQwen2LMHeadModel"], "model_type": "a2d-qwen2"}
A2D_QWEN3 = {"architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3"}
LLADA_MOE = {
    **SPARSE,
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "llada",
    "attention_bias": False,
    "clip_qkv": None,
    "dense_intermediate_size": 96,
    "expert_intermediate_size": 24,
    "hidden_act": "silu",
    "moe_layer_freq": [1, 1],
    "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax",
    "norm_topk_prob": None,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "partial_rotary_factor": 1,
    "qk_layernorm": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "routed_scaling_factor": 1,
    "router_aux_loss_coef": 0.01,
    "shared_expert_intermediate_size": None,
}
MODELS: dict[str, Disguise] = {
    "a2d-qwen2": (Qwen2ForCausalLM, Qwen2Config(**DENSE), A2D_QWEN2),
    "a2d-qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(**DENSE, head_dim=16, tie_word_embeddings=True),
        A2D_QWEN3,
    ),
    "llada_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SPARSE, **EXPERTS, head_dim=12, rms_norm_eps=1e-6),
        LLADA_MOE,
    ),
}


def written(name: str, folder: Path) -> PreTrainedModel:
    """Save a transformers model with random weights under the fields of the family."""
    kind, config, own = MODELS[name]
    model = build_random(kind, config)
    model.tie_weights()
    model.save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text()) if name != "llada_moe" else {}
    write_fields(folder, {**fields, **own, "mask_token_id": MASK})
    return model


def write_fields(folder: Path, fields: dict[str, Any]) -> None:
    """Write a `config.json`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = written(name, tmp_path)
    ours, config = load_model(tmp_path), load_config(tmp_path)
    assert config.family == name.partition("-")[0] and config.kind is Kind.DIFFUSION
    assert (config.shift, config.mask_id, config.block) == (0, MASK, 32)
    expected = reference(theirs, IDS, [len(IDS)])
    close(whole(ours, IDS, causal=False), expected)
    save_model(ours, tmp_path / "again", dtype=torch.float32)
    close(whole(load_model(tmp_path / "again"), IDS, causal=False), expected)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_equals_that_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = written(name, tmp_path)
    llm = LLM(tmp_path, cache_gib=0.01)
    assert type(llm.method) is Diffusion
    prompts = [IDS[:23], IDS[:5]]
    method = Diffusion(block=8, steps=12)
    outputs = llm.generate(prompts, method=method, max_tokens=24, ignore_eos=True)

    def official(_: Any, canvas: list[int], start: int) -> Tensor:
        return reference_without_mask(theirs, canvas, [len(canvas)])

    monkeypatch.setattr(naive.Kept, "logits", official)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = naive.diffusion(
            llm.target.model, prompt, 24, order="confidence", steps=12, block=8
        )
        assert list(output.ids) == expected


def test_masks_of_published_vocabularies(tmp_path: Path) -> None:
    for fields, vocab, mask in [
        ({**A2D_QWEN2, **DENSE}, 151_936, 151_665),
        ({**A2D_QWEN3, **DENSE}, 151_936, 151_669),
        (LLADA_MOE, 157_184, 156_895),
    ]:
        write_fields(tmp_path, {**fields, "vocab_size": vocab})
        assert load_config(tmp_path).mask_id == mask
        write_fields(tmp_path, {**fields, "vocab_size": 300})
        with pytest.raises(ValueError, match="must contain mask_token_id"):
            load_config(tmp_path)


@pytest.mark.parametrize("name", OMITTED)
def test_omitted_block_lengths_follow_from_the_name(name: str, tmp_path: Path) -> None:
    fields = {**A2D_QWEN3, **DENSE, "vocab_size": 151_936}
    cached = tmp_path / f"models--dllm-hub--{name}" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    for folder in (tmp_path / name, tmp_path / name.upper(), cached):
        write_fields(folder, fields)
        config = load_config(folder)
        assert (config.kind, config.block, config.family) == (Kind.BLOCK, 32, "a2d_block")
    write_fields(cached, {**fields, "block_size": 16})
    assert load_config(cached).block == 16
    write_fields(cached, {**fields, "block_size": None})
    assert load_config(cached).kind is Kind.DIFFUSION


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("a2d-qwen3", {"model_type": "qwen3"}, "model_type must be a2d-qwen2 or a2d-qwen3"),
        ("a2d-qwen3", {"model_type": None}, "field 'model_type' is missing"),
        ("a2d-qwen3", {"attention_bias": True}, "attention_bias must be False, got True"),
        ("a2d-qwen3", {"block_size": 0}, "block_size must be a whole number .*got 0"),
        ("a2d-qwen3", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("llada_moe", {"moe_layer_freq": [0, 1]}, r"moe_layer_freq must be \[1, 1\], got \[0, 1\]"),
        ("llada_moe", {"moe_layer_freq": [1]}, r"moe_layer_freq must be \[1, 1\], got \[1\]"),
        ("llada_moe", {"moe_router_score_function": "sigmoid"}, "must be 'softmax'"),
        ("llada_moe", {"moe_router_enable_expert_bias": True}, "expert_bias is True"),
        ("llada_moe", {"shared_expert_intermediate_size": 8}, "intermediate_size is 8"),
        ("llada_moe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("llada_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
        ("llada_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor must be 1"),
        ("llada_moe", {"qk_layernorm": None}, "field 'qk_layernorm' is missing"),
        ("llada_moe", {"a_later_field": 1}, "a_later_field is 1"),
    ],
)
def test_unsupported_fields_are_refused(
    name: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    own = {**DENSE, **MODELS[name][2]} if name != "llada_moe" else LLADA_MOE
    write_fields(tmp_path, {**own, "mask_token_id": MASK, **fields})
    with pytest.raises(ValueError, match=words):
        load_config(tmp_path)
