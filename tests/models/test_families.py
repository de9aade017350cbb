"""Compare diffusion families with transformers models whose causal mask is replaced.

A2D is Qwen2.5 or Qwen3, LLaDA-MoE is Qwen3-MoE, SDAR and Efficient-DLM are Qwen3, Fast-dLLM v2 and
SDLM are Qwen2.5, LLaDA2 is Glm4-MoE, Stable-DiffCoder is Llama, and Nemotron-Labs-Diffusion is
Ministral 3, under other names. Dream, LLaDA and SDAR are compared with their authors' code, in
`tests/golden`.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import naive
from helpers import close, same_weights
from outpace import LLM
from outpace.checkpoints.checkpoint import translate_config
from outpace.checkpoints.families.a2d import OMITTED
from outpace.checkpoints.load import load_config, load_model, save_model
from outpace.decoding import Kind
from outpace.methods import Autoregressive, BlockDiffusion, Diffusion, Lookup, Method, Speculative

MASK, IDS = 63, [3, 61, 27, 52, 14, 9, 40, 8, 61, 0, 33, 12, 7, 5, 44, 21, 2] * 3
SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "eos_token_id": 1,
}

Disguise = tuple[type[PreTrainedModel], PreTrainedConfig, dict[str, Any]]
"""Class and configuration in transformers, and fields of the family's `config.json`."""
SPARSE = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
MASKED = {"mask_token_id": MASK}
LLADA_MOE = {
    **SPARSE,
    **MASKED,
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "llada",
    "attention_bias": False,
    "clip_qkv": None,
    "dense_intermediate_size": 96,
    "expert_intermediate_size": 24,
    "hidden_act": "silu",
    "moe_layer_freq": [1, 1, 1],
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
GROUPS = {
    **EXPERTS,
    "norm_topk_prob": True,
    "head_dim": 16,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
}
GLM = Glm4MoeConfig(**SIZES, **GROUPS, n_routed_experts=12, n_shared_experts=2, use_qk_norm=True)
LLADA2 = {
    **{name: value for name, value in SIZES.items() if name != "pad_token_id"},
    **GROUPS,
    **MASKED,
    "architectures": ["LLaDA2MoeModelLM"],
    "num_experts": 12,
    "num_shared_experts": 2,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "score_function": "sigmoid",
    "model_type": "llada2_moe",
}
A2D_QWEN2 = {**MASKED, "architectures": ["A2DQwen2LMHeadModel"], "model_type": "a2d-qwen2"}
A2D_QWEN3 = {**MASKED, "architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3"}
FAST = {**MASKED, "architectures": ["Fast_dLLM_QwenForCausalLM"], "bd_size": 8}
SDAR = {**MASKED, "architectures": ["SDARForCausalLM"], "block_size": 4}
EFFICIENT = {
    **MASKED,
    "architectures": ["EfficientDLM"],
    "block_size": 8,
    "dlm_arch": "encoder",
    "dlm_paradigm": "bidirectional",
    "dlm_type": "llada",
}
SEED = {**MASKED, "architectures": ["StableDiffcoderForCausalLM"], "resid_pdrop": 0.1}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 0.25,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
SDLM = {
    "architectures": ["SDLMQwen2ForCausalLM"],
    "block_size": 4,
    "casual_attn": False,
    "text_mask_token": "<text_mask>",
    "text_mask_token_id": MASK,
}
NEMOTRON = {
    **MASKED,
    "architectures": ["NemotronLabsDiffusionModel"],
    "ar_loss_weight": 1.0,
    "block_size": 8,
    "dlm_loss_weight": None,
    "dlm_paradigm": "bidirectional",
    "dp_varying_mask_ratio": False,
    "model_type": "nemotron_labs_diffusion",
}
QWEN2 = Qwen2Config(**SIZES)
QWEN3 = Qwen3Config(**SIZES, head_dim=16)
QWEN3_TIED = Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)
QWEN3_MOE = Qwen3MoeConfig(
    **SIZES, **EXPERTS, num_experts=6, head_dim=12, norm_topk_prob=True, rms_norm_eps=1e-6
)
QWEN3_MOE_PLAIN = Qwen3MoeConfig(**SPARSE, **EXPERTS, num_experts=6, head_dim=12, rms_norm_eps=1e-6)
MINISTRAL = Ministral3Config(**SIZES, head_dim=16, sliding_window=None, rope_parameters=YARN)
MODELS: dict[str, Disguise] = {
    "a2d-qwen2": (Qwen2ForCausalLM, QWEN2, A2D_QWEN2),
    "a2d-qwen3": (Qwen3ForCausalLM, QWEN3_TIED, A2D_QWEN3),
    "llada_moe": (Qwen3MoeForCausalLM, QWEN3_MOE_PLAIN, LLADA_MOE),
    "a2d_block-qwen2": (Qwen2ForCausalLM, QWEN2, {**A2D_QWEN2, "block_size": 8}),
    "a2d_block-qwen3": (Qwen3ForCausalLM, QWEN3_TIED, {**A2D_QWEN3, "block_size": 8}),
    "sdar": (Qwen3ForCausalLM, QWEN3, SDAR),
    "sdar_moe": (Qwen3MoeForCausalLM, QWEN3_MOE, {**SDAR, "architectures": ["SDARMoeForCausalLM"]}),
    "efficient_dlm": (Qwen3ForCausalLM, QWEN3, EFFICIENT),
    "fast_dllm_v2": (Qwen2ForCausalLM, QWEN2, FAST),
    "fast_dllm_v2-tied": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True), FAST),
    "llada2": (Glm4MoeForCausalLM, GLM, LLADA2),
    "stable_diffcoder": (LlamaForCausalLM, LlamaConfig(**SIZES), SEED),
    "sdlm": (Qwen2ForCausalLM, QWEN2, SDLM),
    "nemotron_diffusion": (Ministral3ForCausalLM, MINISTRAL, NEMOTRON),
}
BLOCKS = {
    **dict.fromkeys(("a2d-qwen2", "a2d-qwen3", "llada_moe", "llada2"), 32),
    **dict.fromkeys(("sdar", "sdar_moe", "stable_diffcoder", "sdlm"), 4),
}
"""Length of a block, where it is not 8."""
CAUSAL = ("sdlm", "nemotron_diffusion")
OTHER = {
    "embed_tokens": "word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "gate.e_score_correction_bias": "gate.expert_bias",
}
"""LLaDA2's names of tensors that Glm4-MoE names differently."""


def build_random(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model with random weights; norms are around a half."""
    torch.manual_seed(0)
    model = kind(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() >= 2 else 0.5, std=0.2)
    return model


def rename_prefixes(path: Path) -> None:
    """Rewrite a checkpoint under the names of NVIDIA's diffusion models."""
    tensors = {
        name.replace("lm_head.", "diffusion_head.").replace("model.", "encoder."): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


@torch.inference_mode()
def reference(model: PreTrainedModel, ids: list[int], ends: list[int]) -> Tensor:
    """Return logits of transformers in which a row sees up to the end of its block."""
    stops = torch.tensor([next(end for end in ends if end > slot) for slot in range(len(ids))])
    hidden = torch.arange(len(ids)) >= stops[:, None]
    mask = torch.zeros(1, 1, *hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    return model(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0]


def reference_without_mask(model: PreTrainedModel, ids: list[int], ends: list[int]) -> Tensor:
    """Return logits of transformers in which the mask token is never predicted."""
    logits = reference(model, ids, ends).clone()
    logits[:, MASK] = -torch.inf
    return logits


def published_fields(name: str, **changes: Any) -> dict[str, Any]:
    """Return the fields of a family's `config.json`."""
    _, config, own = MODELS[name]
    plain = {} if name in ("llada_moe", "llada2") else json.loads(config.to_json_string())
    return {**plain, **own, **changes}


def write_fields(folder: Path, fields: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))


def write_model(name: str, folder: Path) -> PreTrainedModel:
    """Save a transformers model with random weights under the names of the family."""
    kind, config, _ = MODELS[name]
    model = build_random(kind, config)
    for part, buffer in model.named_buffers():
        if part.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    if name in CAUSAL:
        model.lm_head.weight *= 4  # so that some predictions are sure
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size="40KB" if name == "sdar" else "1GB")
    if name in ("efficient_dlm", "nemotron_diffusion"):
        rename_prefixes(folder / "model.safetensors")
    if name == "llada2":
        rename_glm(folder / "model.safetensors")
    write_fields(folder, published_fields(name))
    return model


def rename_glm(path: Path) -> None:
    """Rewrite a Glm4-MoE checkpoint as an LLaDA2 checkpoint."""
    theirs, ours = load_file(path), {}
    for name, tensor in theirs.items():
        for old, new in OTHER.items():
            name = name.replace(old, new)
        if ".self_attn.q_proj." in name:
            parts = [theirs[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name = name.replace("self_attn.q_proj", "attention.query_key_value")
            tensor = torch.cat(parts)
        if ".self_attn." not in name:
            ours[name] = tensor
    save_file(ours, path, metadata={"format": "pt"})


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("family")
    return request.param, write_model(request.param, folder), folder


def test_logits_equal_those_of_transformers(
    pair: tuple[str, PreTrainedModel, Path], tmp_path: Path
) -> None:
    name, theirs, folder = pair
    ours, config, n = load_model(folder), load_config(folder), len(IDS)
    assert (config.family, config.mask_id) == (name.partition("-")[0], MASK)
    assert config.block == BLOCKS.get(name, 8)
    if name in ("a2d-qwen2", "a2d-qwen3", "llada_moe"):
        assert (config.kind, config.shift) == (Kind.DIFFUSION, 0)
        ends = [n]
    elif name in CAUSAL:
        assert (config.kind, config.shift) == (Kind.CAUSAL_BLOCK, 1)
        assert config.mask_shift == (name == "sdlm")
        with torch.inference_mode():
            causal = theirs(torch.tensor([IDS])).logits[0]
        every = naive.by_block(ours, IDS, [*range(1, n + 1)])
        close(every.roll(-1, 0)[:, :MASK], causal[:, :MASK])
        ends = [*range(1, n - 6), n]
    else:
        assert config.kind is Kind.BLOCK
        ends = [*range(config.block, n, config.block), n]
    expected = reference(theirs, IDS, ends).roll(config.shift, 0)
    close(naive.by_block(ours, IDS, ends)[:, :MASK], expected[:, :MASK])
    save_model(ours, tmp_path, dtype=torch.float32)
    if name == "sdar":  # in several files
        close(naive.by_block(load_model(tmp_path), IDS, ends), naive.by_block(ours, IDS, ends), 0.0)
    else:
        same_weights(tmp_path, folder)


def test_greedy_text_equals_that_of_transformers(
    pair: tuple[str, PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, theirs, folder = pair
    llm = LLM(folder, cache_gib=0.01)
    model, prompts = llm.target.model, [IDS[:37], IDS[:5]]

    def cached(_: Any, canvas: list[int], start: int) -> Tensor:
        return reference_without_mask(theirs, canvas, [len(canvas)])

    def by_block(model: Any, canvas: list[int], ends: list[int]) -> Tensor:
        return reference_without_mask(theirs, canvas, ends).roll(model.config.shift, 0)

    def check(method: Method, decode: Any, **options: Any) -> None:
        outputs = llm.generate(
            prompts, method=method, max_tokens=21, ignore_eos=True, temperature=0
        )
        for prompt, output in zip(prompts, outputs, strict=True):
            assert list(output.ids) == decode(model, prompt, 21, **options)

    monkeypatch.setattr(naive.Kept, "logits", cached)
    monkeypatch.setattr(naive, "by_block", by_block)
    if model.config.kind is Kind.DIFFUSION:
        assert type(llm.method) is Diffusion
        options = {"steps": 12, "block": 8}
        check(Diffusion(**options), naive.diffusion, order="confidence", **options)
        return
    assert type(llm.method) is BlockDiffusion
    decode = naive.prefix_filled if name == "sdlm" else naive.block_diffusion
    check(BlockDiffusion(threshold=0.3), decode, threshold=0.3)
    if name in CAUSAL:
        check(BlockDiffusion(threshold=None), decode, threshold=None)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("a2d-qwen3", {"model_type": "qwen3"}, "model_type"),
    ("a2d-qwen3", {"attention_bias": True}, "attention_bias"),
    ("a2d-qwen3", {"block_size": 0}, "block_size"),
    ("a2d-qwen3", {"use_sliding_window": True}, "use_sliding_window"),
    ("llada_moe", {"moe_layer_freq": [0, 1, 1]}, "moe_layer_freq"),
    ("llada_moe", {"moe_router_score_function": "sigmoid"}, "moe_router_score_function"),
    ("llada_moe", {"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias"),
    ("llada_moe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("llada_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llada_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
    ("llada_moe", {"qk_layernorm": None}, "qk_layernorm"),
    ("llada_moe", {"a_later_field": 1}, "a_later_field"),
    ("llada2", {"use_linear_attention": True}, "use_linear_attention"),
    ("llada2", {"score_function": "softmax"}, "score_function"),
    ("llada2", {"use_qk_norm": False}, "use_qk_norm"),
    ("llada2", {"partial_rotary_factor": 0.7}, "partial_rotary_factor"),
    ("llada2", {"rotary_dim": 16}, "rotary_dim"),
    ("llada2", {"partial_rotary_factor": 0.25, "rotary_dim": 8}, "rotary_dim"),
    ("llada2", {"router_dtype": "bf16"}, "router_dtype"),
    ("llada2", {"n_group": 5}, "2 of 5"),
    ("llada2", {"topk_group": 9}, "9 of 4"),
    ("llada2", {"n_group": 12, "topk_group": 3}, "3 of 12"),
    ("sdar", {"mask_token_id": None}, "mask_token_id"),
    ("sdlm", {"casual_attn": True}, "casual_attn"),
    ("sdlm", {"causal_attn": True}, "causal_attn"),
    ("sdlm", {"text_mask_token_id": None}, "text_mask_token_id"),
    ("sdlm", {"block_size": None}, "block_size"),
    ("sdlm", {"use_sliding_window": True}, "use_sliding_window"),
    ("nemotron_diffusion", {"dlm_paradigm": "autoregressive"}, "dlm_paradigm"),
    ("nemotron_diffusion", {"block_size": 2.5}, "block_size"),
    ("nemotron_diffusion", {"rope_parameters": {**YARN, "mscale": 2.0}}, "mscale"),
    ("nemotron_diffusion", {"rope_parameters": {**YARN, "other": 2}}, "other"),
    (
        "nemotron_diffusion",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": "long"}},
        "original_max_position_embeddings",
    ),
    ("nemotron_diffusion", {"a_later_field": 1}, "a_later_field"),
]


@pytest.mark.parametrize(("name", "changes", "field"), REFUSED)
def test_unsupported_fields_are_refused(name: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=re.escape(field)):
        translate_config(published_fields(name, **changes))


def test_equivalent_fields_are_accepted() -> None:
    plain = translate_config(LLADA2)
    later = {"rotary_dim": 8, "router_dtype": "fp32", "_moe_implementation": "fused"}
    found = translate_config({**LLADA2, **later})
    assert found == plain and plain.precise_router
    fields = published_fields("nemotron_diffusion")
    assert translate_config(fields).max_length == 128 < fields["max_position_embeddings"]


@pytest.mark.parametrize("name", OMITTED)
def test_omitted_block_lengths_follow_from_the_name(name: str, tmp_path: Path) -> None:
    fields = published_fields("a2d-qwen3", vocab_size=151_936)
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


def test_other_tensors_than_those_of_the_model_are_refused(tmp_path: Path) -> None:
    write_model("llada2", tmp_path)
    for fields in ({"first_k_dense_replace": 2}, {"num_shared_experts": 0}):
        write_fields(tmp_path, {**LLADA2, **fields})
        with pytest.raises(ValueError, match="tensors"):
            load_model(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CAUSAL)
def test_lossless_methods_give_autoregressive_text(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path)
    llm = LLM(tmp_path, cache_gib=0.02)
    prompts = [IDS[:37], IDS[:5], IDS[:16]]
    for temperature in (0.0, 0.7):
        settings = {"max_tokens": 21, "temperature": temperature, "seed": 3}
        expected = [
            output.ids for output in llm.generate(prompts, method=Autoregressive(), **settings)
        ]
        for method in (
            BlockDiffusion(verify=True, threshold=None),
            BlockDiffusion(verify=True, threshold=0.2),
            Lookup(),
            Speculative(draft=str(tmp_path)),
        ):
            outputs = llm.generate(prompts, method=method, **settings)
            assert [output.ids for output in outputs] == expected


def test_verified_drafts_are_the_models_own(tmp_path: Path) -> None:
    write_model("nemotron_diffusion", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    tensors["diffusion_head.weight"].zero_()
    tensors["diffusion_head.weight"][7] = 1.0
    tensors["encoder.embed_tokens.weight"].abs_()
    save_file(tensors, path, metadata={"format": "pt"})
    llm = LLM(tmp_path, cache_gib=0.01)
    method = BlockDiffusion(verify=True, threshold=None)
    (output,) = llm.generate([IDS[:5]], method=method, max_tokens=33)
    assert list(output.ids) == [7] * 33
    # One token, seven drafted after it, and then eight in each forward.
    assert output.forwards == 5
