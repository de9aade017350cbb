"""Published configurations: those that are supported, and those that must be refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.load import translate_config
from outpace.decoding import Kind
from outpace.models.transformer import Transformer

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "golden" / "configs.json").read_text()
)
REFUSED = {
    "LLaDA2.0-Uni": r"auto_map names 'configuration_llada2uni_moe.LLaDA2MoeConfig', code of",
    "dflash-test": r"field 'mask_token_id' is missing",
    "sdar_4b_multi_block_causal-final": r"block_causal_prompt is True, which is not supported",
}
"""Models that are not decoded as their architecture implies, and why."""
CONFIGS = {name: fields for name, fields in PUBLISHED.items() if name not in REFUSED}
QUANTISED = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq": {"bits": 4, "group_size": 128, "quant_method": "gptq"},
    "awq": {"bits": 4, "quant_method": "awq", "version": "gemm"},
}


YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configuration_is_read(name: str) -> None:
    published = CONFIGS[name]
    config = translate_config(published)
    for part in ("transformer_layer_config", "text_config"):
        published = {**published, **published.get(part, {})}
    assert config.dim == published.get("hidden_size", published.get("d_model"))
    assert config.head_dim in (64, 96, 128, 192, 256)
    with torch.device("meta"):
        if not config.feature_layers and config.kind is not Kind.EAGLE:
            few = replace(config, layers=4 if config.delta else 2, sights=config.sights[:2])
            few = replace(few, shared_keys=None)  # of layers that are cut
            assert Transformer(few).blocks[-1].attention.out.weight.shape[0] == config.dim
    nested = published.get("dflash_config", {})
    masks = dict.fromkeys(("WeDLM-7B", "WeDLM-8B", "Fast_dLLM_v2_7B"), 151665)
    masks |= dict.fromkeys(("LLaDA2.0-mini", "LLaDA2.1-mini", "DMax-Math-16B"), 156895)
    masks |= dict.fromkeys(("SDAR-4B-Chat", "Qwen3-0.6B-diffusion-mdlm-v0.1"), 151669)
    masks |= {"LLaDA-MoE-7B-A1B-Base": 156895, "Stable-DiffCoder-8B-Base": 5}
    masks["SDLM-32B-D4"] = 151665
    mask = nested.get("mask_token_id", published.get("mask_token_id", masks.get(name)))
    assert config.mask_id == mask
    every = published.get("sliding_window_pattern", config.layers + 1)
    usual = ["sliding_attention"] * (config.layers - config.layers // every)
    listed = published.get("layer_types", usual if config.sights else [])
    windows = [sight.window for sight in config.sights if sight.window is not None]
    assert windows == [published.get("sliding_window")] * listed.count("sliding_attention")


@pytest.mark.parametrize("name", CONFIGS)
def test_other_remote_code_is_refused(name: str) -> None:
    published = CONFIGS[name]
    for key in ("AutoModel", "AutoModelForCausalLM", "AutoConfig", "", "AutoModelForOther"):
        for value in ("modeling_other.Other", "some/model--modeling_other.Other", 5):
            code = {**(published.get("auto_map") or {}), key: value}
            with pytest.raises(ValueError, match=r"^config\.json: auto_map names '(.*Other|5)'"):
                translate_config({**published, "auto_map": code})
    named = [*published["architectures"], "OtherForCausalLM"]
    with pytest.raises(ValueError, match=r"architectures must name one|is not supported"):
        translate_config({**published, "architectures": named})


@pytest.mark.parametrize("name", [name for name in CONFIGS if "auto_map" in PUBLISHED[name]])
def test_remote_code_of_a_family_is_accepted(name: str) -> None:
    published = CONFIGS[name]
    there = {key: f"some/model--{value}" for key, value in published["auto_map"].items()}
    there["AutoTokenizer"] = ["tokenization_other.Slow", None]
    config = translate_config({**published, "auto_map": there})
    assert config == translate_config(published)
    assert FAMILIES[config.family].remote


@pytest.mark.parametrize("method", QUANTISED)
@pytest.mark.parametrize("name", CONFIGS)
def test_quantized_checkpoint_has_the_same_configuration(name: str, method: str) -> None:
    published = {**CONFIGS[name], "quantization_config": QUANTISED[method]}
    config = translate_config(published)
    assert config == translate_config(CONFIGS[name]) and "quantization_config" not in config.source
    published["quantization_config"] = {"quant_method": f"{method}-later"}
    message = rf"^config\.json: quantization_config: quant_method '{method}-later' is not supported"
    with pytest.raises(ValueError, match=message):
        translate_config(published)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Qwen2-0.5B", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("Qwen2-0.5B", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ("Qwen2-0.5B", {"attention_bias": False}, "attention_bias must be True, got False"),
        ("Qwen3-0.6B", {"num_experts": 128}, "num_experts is 128"),
        ("Qwen3-0.6B", {"a_multiplier": 0}, "a_multiplier is 0, which is not supported"),
        ("Qwen3-8B", {"layer_types": ["sliding_attention"] * 36}, "has 'sliding_attention'"),
        ("Qwen3-8B", {"layer_types": ["full_attention"]}, "the types of 36 layers"),
        ("Llama-3.2-1B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
        ("Llama-3.2-1B", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("Llama-3.2-1B", {"rope_parameters": {"rope_type": "default"}}, "have different values"),
        ("Llama-3.2-1B", {"head_dim": 63}, "head size must be even, got 63"),
        ("Llama-3.2-1B", {"head_dim": None, "hidden_size": 2050}, "attention heads, got 2050"),
        ("Llama-3.2-1B", {"rope_theta": 1.0}, "rope_theta must be above 1.*got 1.0"),
        ("LLaDA-8B-Instruct", {"layer_norm_type": None}, "'layer_norm_type' is missing"),
        ("gemma-3-1b-it", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, whi"),
        ("gemma-3-1b-it", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, w"),
        ("gemma-3-1b-it", {"use_bidirectional_attention": True}, "use_bidirectional_attention is"),
        ("gemma-3-1b-it", {"hidden_activation": "gelu"}, "hidden_activation must be .*got 'gelu'"),
        ("gemma-3-1b-it", {"rope_local_base_freq": None}, "'rope_local_base_freq' is missing"),
        ("gemma-3-1b-it", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be .*got 0"),
        ("gemma-3-1b-it", {"rope_parameters": {"full_attention": {}}}, "have different values"),
        ("gemma-4-31B-it", {"use_bidirectional_attention": "all"}, "must be 'vision' or null, got"),
        ("gemma-4-31B-it", {"num_global_key_value_heads": 5}, "32 heads, got 5 key/value heads"),
        ("gemma-4-31B-it", {"num_kv_shared_layers": 60}, "num_kv_shared_layers is 60, but"),
        ("gemma-4-31B-it", {"per_layer_config": {"5": {}}}, "for all full-attention layers and"),
        ("gemma-4-31B-it", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma-4-31B-it", {"rope_parameters": {"full_attention": {}}}, "must be 'proportional'"),
        ("gemma-4-26B-A4B-it", {"top_k_experts": None}, "'top_k_experts' is missing"),
        ("gemma-4-26B-A4B-it", {"num_kv_shared_layers": 8}, "must be 0 with enable_moe_block"),
        ("gemma-4-E2B-it", {"vocab_size_per_layer_input": 8}, "must be 262144, got 8"),
        ("gemma-4-12B", {"hidden_size_per_layer_input": 256}, "must be 0, got 256"),
        ("gpt-oss-20b", {"swiglu_limit": 6.0}, "swiglu_limit must be 7.0, got 6.0"),
        ("gpt-oss-20b", {"experts_per_token": 2}, "experts_per_token must be 4, got 2"),
        ("gpt-oss-20b", {"num_local_experts": 2}, "4 of 2 experts"),
        ("Olmo-3-7B-Think", {"sliding_window": None}, "'sliding_window' is missing"),
        ("Olmo-3-7B-Think", {"rope_local_base_freq": 1e4}, "rope_local_base_freq is 10000.0"),
        (
            "Qwen3.5-4B-DFlash",
            {"layer_types": None},
            "use_sliding_window is True, which needs layer_types",
        ),
        ("Qwen3.5-4B-DFlash", {"layer_types": []}, r"layer_types must list the types.*got \[\]"),
        (
            "Qwen3.5-4B-DFlash",
            {"layer_types": ["full_attention"]},
            "layer_types must list the types of",
        ),
        ("Qwen3.5-4B-DFlash", {"layer_types": ["full_attention"] * 6}, "has 0 sliding layers"),
        ("Qwen3.5-4B-DFlash", {"use_sliding_window": False}, "layer_types has 5 sliding layers"),
        ("Qwen3.5-4B-DFlash", {"sliding_window": 0}, "sliding_window must be a whole.*got 0"),
        (
            "Qwen3.5-4B-DFlash",
            {"dflash_config": {"target_layer_ids": [], "mask_token_id": 9}},
            "at least one number",
        ),
        ("Qwen3.5-4B-DFlash", {"block_size": 8}, "block_size is 8 in one place and 16 in ano"),
        ("Qwen3.5-4B-DFlash", {"mask_token_id": 1}, "mask_token_id is 1 in one place and 248"),
        ("Qwen3.5-4B-DFlash", {"target_layer_ids": [1]}, r"target_layer_ids is \[1\] in one pl"),
        ("Qwen3.5-4B-DFlash", {"eagle_aux_hidden_state_layer_ids": [1, 5]}, "different values"),
        ("Qwen3.5-4B-DFlash", {"is_causal": True, "causal": False}, "causal and is_causal have"),
        ("Qwen3-8B-DFlash-b16", {"sliding_window": 0}, "sliding_window must be a wh.*got 0"),
        ("Qwen3-8B-DFlash-b16", {"use_sliding_window": True}, "has 0 sliding layers"),
        ("Qwen3-8B-DFlash-b16", {"layer_types": []}, r"layer_types must list the types.*got \[\]"),
        ("Qwen3-8B", {"layer_types": []}, r"layer_types must list the types.*got \[\]"),
        ("gpt-oss-20b", {"layer_types": []}, r"layer_types must list the types.*got \[\]"),
        ("Kimi-K25-eagle3", {"layer_types": []}, r"layer_types must list the types.*got \[\]"),
        ("Qwen3.5-4B-DFlash", {"sliding_window": None}, "'sliding_window' is missing"),
        ("Qwen3.5-4B-DFlash", {"rope_theta": 5.0}, "rope_theta is 5.0 in one place and 10000000"),
        ("Qwen3.5-4B-DFlash", {"target_hidden_size": 64}, "target_hidden_size must be .*got 64"),
    ],
)
def test_other_models_of_a_format_are_refused(
    name: str, fields: dict[str, Any], message: str
) -> None:
    published = CONFIGS[name]
    changed = {**published, **fields}
    if "text_config" in published:
        changed = {**published, "text_config": {**published["text_config"], **fields}}
    with pytest.raises(ValueError, match=message):
        translate_config(changed)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "longrope", "factor": 2.0}, "'longrope' is not supported; supported: default"),
        ({"type": ["yarn"]}, r"\['yarn'\] is not supported"),
        ({"type": "yarn", "factor": 4.0}, "'original_max_position_embeddings' is missing"),
        ({"type": "linear", "factor": "2"}, "factor must be a positive.*got '2'"),
        ({"type": "linear", "factor": 2.0, "mscale": 1.0}, "mscale is 1.0, which is not supported"),
        ({"type": "linear", "factor": 2.0, "truncate": False}, "truncate must be True, got False"),
        ({"type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
        ({"type": "yarn", **YARN, "truncate": 0}, "truncate must be true or false.*got 0"),
    ],
)
def test_scaling_is_read_or_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        translate_config({**CONFIGS["Qwen2-0.5B"], "rope_scaling": scaling})
