"""Published configurations: those that are supported, and those that must be refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.checkpoints.checkpoint import translate_config
from outpace.checkpoints.families import FAMILIES
from outpace.decoding import Kind
from outpace.models.transformer import Transformer

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "golden" / "configs.json").read_text()
)
REFUSED = {
    "LLaDA2.0-Uni": "auto_map",
    "dflash-test": "mask_token_id",
    "sdar_4b_multi_block_causal-final": "block_causal_prompt",
}
"""Models that are not decoded as their architecture implies, and the field at fault."""
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
            few = replace(config, layers=4 if config.delta else 2, windows=config.windows[:2])
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
    listed = published.get("layer_types", usual if config.windows else [])
    windows = [each.window for each in config.windows if each.window is not None]
    assert windows == [published.get("sliding_window")] * listed.count("sliding_attention")


@pytest.mark.parametrize("name", CONFIGS)
def test_other_remote_code_is_refused(name: str) -> None:
    published = CONFIGS[name]
    for key in ("AutoModel", "AutoModelForCausalLM", "AutoConfig", "", "AutoModelForOther"):
        for value in ("modeling_other.Other", "some/model--modeling_other.Other", 5):
            code = {**(published.get("auto_map") or {}), key: value}
            with pytest.raises(ValueError, match="auto_map"):
                translate_config({**published, "auto_map": code})
    named = [*published["architectures"], "OtherForCausalLM"]
    with pytest.raises(ValueError, match="architectures|OtherForCausalLM"):
        translate_config({**published, "architectures": named})


@pytest.mark.parametrize("name", [name for name in CONFIGS if "auto_map" in PUBLISHED[name]])
def test_remote_code_of_a_family_is_accepted(name: str) -> None:
    published = CONFIGS[name]
    there = {key: f"some/model--{value}" for key, value in published["auto_map"].items()}
    there["AutoTokenizer"] = ["tokenization_other.Slow", None]
    config = translate_config({**published, "auto_map": there})
    assert config == translate_config(published)
    assert FAMILIES[config.family].remote


@pytest.mark.sampled
@pytest.mark.parametrize("method", QUANTISED)
@pytest.mark.parametrize("name", CONFIGS)
def test_quantized_checkpoint_has_the_same_configuration(name: str, method: str) -> None:
    published = {**CONFIGS[name], "quantization_config": QUANTISED[method]}
    config = translate_config(published)
    assert config == translate_config(CONFIGS[name]) and "quantization_config" not in config.source
    published["quantization_config"] = {"quant_method": f"{method}-later"}
    with pytest.raises(ValueError, match=f"{method}-later"):
        translate_config(published)


OTHERS: dict[str, list[dict[str, Any]]] = {
    "Qwen2-0.5B": [{"attention_bias": False}, {"a_multiplier": 0}],
    "Qwen3-8B": [{"layer_types": ["full_attention"]}, {"layer_types": []}],
    "Llama-3.2-1B": [
        {"sliding_window": 4096},
        {"head_dim": 63},
        {"hidden_size": 2050, "head_dim": None},
        {"rope_theta": 1.0},
    ],
    "LLaDA-8B-Instruct": [{"layer_norm_type": None}],
    "gemma-3-1b-it": [
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"use_bidirectional_attention": True},
        {"hidden_activation": "gelu"},
        {"rope_local_base_freq": None},
        {"query_pre_attn_scalar": 0},
    ],
    "gemma-4-31B-it": [
        {"use_bidirectional_attention": "all"},
        {"num_global_key_value_heads": 5},
        {"num_kv_shared_layers": 60},
        {"per_layer_config": {"5": {}}},
        {"attn_logit_softcapping": 50.0},
        {"rope_parameters": {"full_attention": {}}},
    ],
    "gemma-4-26B-A4B-it": [{"top_k_experts": None}, {"num_kv_shared_layers": 8}],
    "gemma-4-E2B-it": [{"vocab_size_per_layer_input": 8}],
    "gemma-4-12B": [{"hidden_size_per_layer_input": 256}],
    "gpt-oss-20b": [
        {"swiglu_limit": 6.0},
        {"experts_per_token": 2},
        {"num_local_experts": 2},
        {"layer_types": []},
    ],
    "Olmo-3-7B-Think": [{"sliding_window": None}, {"rope_local_base_freq": 1e4}],
    "Qwen3.5-4B-DFlash": [
        {"layer_types": None},
        {"layer_types": []},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention"] * 6},
        {"use_sliding_window": False},
        {"sliding_window": 0},
        {"sliding_window": None},
        {"block_size": 8},
        {"mask_token_id": 1},
        {"target_layer_ids": [1]},
        {"eagle_aux_hidden_state_layer_ids": [1, 5]},
        {"causal": False, "is_causal": True},
        {"rope_theta": 5.0},
        {"target_hidden_size": 64},
    ],
    "Qwen3-8B-DFlash-b16": [
        {"sliding_window": 0},
        {"use_sliding_window": True},
        {"layer_types": []},
    ],
    "Kimi-K25-eagle3": [{"layer_types": []}],
}
"""Fields of other models of the same format; the first one of each is named."""
NAMED = {
    "head_dim": "head size",
    "hidden_size": "2050",
    "num_global_key_value_heads": "32 heads",
    "num_local_experts": "2 experts",
    "rope_parameters": "rope_parameters|proportional",
    "type": "rope_scaling",
}
"""What is named instead of a field."""

SCALINGS: list[dict[str, Any]] = [
    {"type": ["yarn"]},
    {"original_max_position_embeddings": None, "type": "yarn", "factor": 4.0},
    {"factor": "2", "type": "linear"},
    {"mscale": 1.0, "type": "linear", "factor": 2.0},
    {"truncate": False, "type": "linear", "factor": 2.0},
    {"partial_rotary_factor": 0.5, "type": "default"},
    {"truncate": 0, "type": "yarn", **YARN},
]


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_decode_otherwise_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]):
        translate_config(PUBLISHED[name])


@pytest.mark.parametrize(
    ("name", "fields"), [(name, fields) for name, every in OTHERS.items() for fields in every]
)
def test_other_models_of_a_format_are_refused(name: str, fields: dict[str, Any]) -> None:
    published, first = CONFIGS[name], next(iter(fields))
    changed = {**published, **fields}
    if "text_config" in published:
        changed = {**published, "text_config": {**published["text_config"], **fields}}
    with pytest.raises(ValueError, match=NAMED.get(first, first)):
        translate_config(changed)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_scalings_are_refused(scaling: dict[str, Any]) -> None:
    first = next(iter(scaling))
    with pytest.raises(ValueError, match=NAMED.get(first, first)):
        translate_config({**CONFIGS["Qwen2-0.5B"], "rope_scaling": scaling})
