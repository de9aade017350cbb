"""Compare block diffusion families with transformers models under a block mask.

SDAR and Efficient-DLM are Qwen3, Fast-dLLM v2 is Qwen2.5, LLaDA2 is Glm4-MoE, A2D is Qwen2.5 or
Qwen3 and Stable-DiffCoder is Llama under other names. SDAR (dense) is also compared with its
authors' code, in `tests/golden`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import naive
from disguised import (
    IDS,
    MASK,
    SIZES,
    Disguise,
    build_random,
    reference,
    rename_prefixes,
    use_official,
)
from helpers import close
from outpace import LLM
from outpace.checkpoints.load import load_config, load_model, save_model
from outpace.decoding import Kind
from outpace.engine.cpu import pack_model, unpack_model
from outpace.methods import BlockDiffusion
from outpace.models.experts import Experts, PreciseLinear

MANY = {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
GLM = Glm4MoeConfig(
    **SIZES,
    **MANY,
    head_dim=16,
    n_routed_experts=12,
    n_group=4,
    topk_group=2,
    n_shared_experts=2,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
    partial_rotary_factor=0.5,
    use_qk_norm=True,
    rms_norm_eps=1e-6,
)
LLADA2 = {
    "architectures": ["LLaDA2MoeModelLM"],
    **{name: value for name, value in SIZES.items() if name not in ("pad_token_id",)},
    **MANY,
    "head_dim": 16,
    "num_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "score_function": "sigmoid",
    "mask_token_id": MASK,
    "model_type": "llada2_moe",
}
FAST = {"architectures": ["Fast_dLLM_QwenForCausalLM"], "bd_size": 8, "mask_token_id": MASK}
SDAR = {"architectures": ["SDARForCausalLM"], "block_size": 4, "mask_token_id": MASK}
A2D = {"block_size": 8, "mask_token_id": MASK}
A2D_QWEN2 = {**A2D, "architectures": ["A2DQwen2LMHeadModel"], "model_type": "a2d-qwen2"}
A2D_QWEN3 = {**A2D, "architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3"}
EFFICIENT = {
    "architectures": ["EfficientDLM"],
    "block_size": 8,
    "mask_token_id": MASK,
    "dlm_arch": "encoder",
    "dlm_paradigm": "bidirectional",
    "dlm_type": "llada",
}
SEED = {"architectures": ["StableDiffcoderForCausalLM"], "mask_token_id": MASK, "resid_pdrop": 0.1}
MODELS: dict[str, Disguise] = {
    "a2d_block-qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES), A2D_QWEN2),
    "a2d_block-qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
        A2D_QWEN3,
    ),
    "sdar": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16), SDAR),
    "sdar_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, **MANY, num_experts=6, head_dim=12),
        {**SDAR, "architectures": ["SDARMoeForCausalLM"]},
    ),
    "efficient_dlm": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16), EFFICIENT),
    "fast_dllm_v2": (Qwen2ForCausalLM, Qwen2Config(**SIZES), FAST),
    "fast_dllm_v2-tied": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True), FAST),
    "llada2": (Glm4MoeForCausalLM, GLM, LLADA2),
    "stable_diffcoder": (LlamaForCausalLM, LlamaConfig(**SIZES), SEED),
}
FOURS = ("sdar", "sdar_moe", "stable_diffcoder")
OTHER = {
    "embed_tokens": "word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "gate.e_score_correction_bias": "gate.expert_bias",
}
"""LLaDA2's names of tensors that Glm4-MoE names differently."""


def written(name: str, folder: Path) -> PreTrainedModel:
    """Save a transformers model with random weights under the names of the family."""
    kind, config, own = MODELS[name]
    model = build_random(kind, config)
    for part, buffer in model.named_buffers():
        if part.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size="40KB" if name == "sdar" else "1GB")
    if name == "efficient_dlm":
        rename_prefixes(folder / "model.safetensors")
    if name == "llada2":
        renamed(folder / "model.safetensors")
        published = own
    else:
        published = {**json.loads((folder / "config.json").read_text()), **own}
    (folder / "config.json").write_text(json.dumps(published))
    return model


def renamed(path: Path) -> None:
    """Rewrite a Glm4-MoE checkpoint as an LLaDA2 checkpoint."""
    theirs, ours = load_file(path), {}
    for name, tensor in theirs.items():
        for old, new in OTHER.items():
            name = name.replace(old, new)
        if ".self_attn.q_proj." in name:
            parts = [
                theirs[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")
            ]
            name, tensor = (
                name.replace("self_attn.q_proj", "attention.query_key_value"),
                torch.cat(parts),
            )
        if ".self_attn." not in name:
            ours[name] = tensor
    save_file(ours, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = written(name, tmp_path)
    ours, config = load_model(tmp_path), load_config(tmp_path)
    assert config.family == name.partition("-")[0] and config.kind is Kind.BLOCK
    assert config.block == {**dict.fromkeys(FOURS, 4), "llada2": 32}.get(name, 8)
    ends = [*range(config.block, len(IDS), config.block), len(IDS)]
    expected = reference(theirs, IDS, ends).roll(config.shift, 0)
    close(naive.by_block(ours, IDS, ends)[:, :MASK], expected[:, :MASK])
    save_model(ours, tmp_path / "again", dtype=torch.float32)
    again = load_model(tmp_path / "again")
    assert all(
        torch.equal(parameter, dict(again.named_parameters())[part])
        for part, parameter in ours.named_parameters()
    )


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_equals_that_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = written(name, tmp_path)
    llm = LLM(tmp_path, cache_gib=0.01)
    prompts = [IDS[:37], IDS[:5]]
    method = BlockDiffusion(threshold=0.3)
    outputs = llm.generate(prompts, method=method, max_tokens=24, ignore_eos=True, temperature=0)

    use_official(theirs, monkeypatch)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = naive.block_diffusion(llm.target.model, prompt, 24, threshold=0.3)
        assert list(output.ids) == expected


def test_unsupported_fields_are_refused(tmp_path: Path) -> None:
    written("llada2", tmp_path)

    def changed(**fields: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**LLADA2, **fields}))

    for fields, words in [
        ({"use_linear_attention": True}, "use_linear_attention is True"),
        ({"score_function": "softmax"}, "score_function must be 'sigmoid'"),
        ({"use_qk_norm": False}, "use_qk_norm must be True"),
        ({"partial_rotary_factor": 0.7}, "partial_rotary_factor must .*got 0.7"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor must .*got 2.0"),
        ({"rotary_dim": 16}, "rotary_dim must be 8, got 16"),
        ({"rotary_dim": 8, "partial_rotary_factor": 0.25}, "rotary_dim must be 4, got 8"),
        ({"router_dtype": "bf16"}, "router_dtype must be 'fp32', got 'bf16'"),
        ({"n_group": 5}, "3 of 12 experts in 2 of 5 groups"),
        ({"topk_group": 9}, "3 of 12 experts in 9 of 4 groups"),
        ({"n_group": 12, "topk_group": 3}, "3 of 12 experts in 3 of 12 groups"),
        ({"mask_token_id": None}, "must contain mask_token_id"),
        ({"num_experts": None}, "num_experts"),
    ]:
        changed(**fields)
        with pytest.raises(ValueError, match=words):
            load_config(tmp_path)
    for fields in ({"first_k_dense_replace": 2}, {"num_shared_experts": 0}):
        changed(**fields)
        with pytest.raises(ValueError, match="tensors of its weights are not of the model"):
            load_model(tmp_path)


def test_equivalent_fields_are_accepted(tmp_path: Path) -> None:
    written("llada2", tmp_path)
    plain = load_config(tmp_path)
    later = {"rotary_dim": 8, "router_dtype": "fp32", "_moe_implementation": "fused"}
    (tmp_path / "config.json").write_text(json.dumps({**LLADA2, **later}))
    assert load_config(tmp_path) == plain and plain.precise_router


@torch.inference_mode()
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_router_is_in_float32(quantize: str | None, tmp_path: Path) -> None:
    written("llada2", tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16, quantize=quantize)
    experts = next(part for part in model.modules() if isinstance(part, Experts))
    weight = experts.router.weight.double()
    rows = (torch.randn(33, 48) * 3).bfloat16()
    exact = rows.double() @ weight.T
    assert (F.linear(rows, weight.bfloat16()) - exact).abs().max() > 1e-2

    def scores() -> Tensor:
        found: Tensor = experts.router(rows)
        assert found.dtype == torch.float32
        assert (found - exact).abs().max() < 1e-4
        return found

    scores()
    pack_model(model)
    found = scores()
    alone = torch.cat([experts.router(row[None]) for row in rows])
    torch.testing.assert_close(alone, found, atol=1e-5, rtol=1e-5)
    shares, numbers = experts.route_rows(found)
    assert shares.dtype == torch.float32
    unpack_model(model)
    scores()
    assert type(experts.router) is PreciseLinear and experts.router.weight.dtype == torch.bfloat16
    total = torch.zeros(33, 48)
    for number, expert in enumerate(experts.experts):
        places = (numbers == number).nonzero()
        own, share = places[:, 0], shares[places[:, 0], places[:, 1], None]
        total[own] += expert(rows[own]).float() * share
    assert experts.shared is not None
    assert torch.equal(experts(rows), total.bfloat16() + experts.shared(rows))


def test_a_missing_block_length_is_required(tmp_path: Path) -> None:
    written("sdar", tmp_path)
    published = json.loads((tmp_path / "config.json").read_text())
    del published["block_size"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    llm = LLM(tmp_path, cache_gib=0.01)
    for method in ("block_diffusion", "d2f"):
        with pytest.raises(ValueError, match="has no block_size"):
            llm.generate([IDS[:5]], method=method, max_tokens=4)
    (output,) = llm.generate([IDS[:5]], method=BlockDiffusion(block=4), max_tokens=4)
    assert len(output.ids) <= 4
    del published["mask_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    with pytest.raises(ValueError, match="must contain mask_token_id"):
        load_config(tmp_path)
