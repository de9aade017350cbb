"""Configurations as they are published: those that load, and those that would load wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outpace.models.load import translate

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "golden" / "configs.json").read_text()
)
QUANTISED = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq": {"bits": 4, "group_size": 128, "quant_method": "gptq"},
    "awq": {"bits": 4, "quant_method": "awq", "version": "gemm"},
}


YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configuration_is_understood(name: str) -> None:
    """Every field of it is known, and sizes and masks are its own."""
    published = CONFIGS[name]
    config = translate(published)
    assert config.dim == published.get("hidden_size", published.get("d_model"))
    assert config.head_dim in (64, 128, 256)
    nested = published.get("dflash_config", {})
    masks = {"WeDLM-7B": 151665, "WeDLM-8B": 151665, "LLaDA2.0-mini": 156895}
    mask = nested.get("mask_token_id", published.get("mask_token_id", masks.get(name)))
    assert config.mask_id == mask
    every = published.get("sliding_window_pattern", config.layers + 1)
    usual = ["sliding_attention"] * (config.layers - config.layers // every)
    listed = published.get("layer_types", usual if config.sights else [])
    windows = [sight.window for sight in config.sights if sight.window is not None]
    assert windows == [published.get("sliding_window")] * listed.count("sliding_attention")


@pytest.mark.parametrize("method", QUANTISED)
@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_checkpoint_is_that_of_the_plain_model(name: str, method: str) -> None:
    """How weights are stored is no part of what a model is; other schemes are refused by name."""
    published = {**CONFIGS[name], "quantization_config": QUANTISED[method]}
    config = translate(published)
    assert config == translate(CONFIGS[name]) and "quantization_config" not in config.source
    published["quantization_config"] = {"quant_method": f"{method}-later"}
    message = rf"^config\.json: quantization_config: quant_method '{method}-later' is not supported"
    with pytest.raises(ValueError, match=message):
        translate(published)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Qwen2-0.5B", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("Qwen2-0.5B", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu' is supp"),
        ("Qwen2-0.5B", {"attention_bias": False}, "attention_bias is False, but only True"),
        ("Qwen3-0.6B", {"num_experts": 128}, "num_experts is 128"),
        ("Qwen3-0.6B", {"a_multiplier": 0}, "a_multiplier is 0, which is not supported"),
        ("Qwen3-8B", {"layer_types": ["sliding_attention"] * 36}, "has 'sliding_attention'"),
        ("Qwen3-8B", {"layer_types": ["full_attention"]}, "the kinds of 36 layers"),
        ("Llama-3.2-1B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("Llama-3.2-1B", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("Llama-3.2-1B", {"rope_parameters": {"rope_type": "default"}}, "say different things"),
        ("Llama-3.2-1B", {"head_dim": 63}, "head size of 63 is odd"),
        ("Llama-3.2-1B", {"head_dim": None, "hidden_size": 2050}, "hidden size of 2050"),
        ("Llama-3.2-1B", {"rope_theta": 1.0}, "rope_theta is 1.0, but must be above 1"),
        ("LLaDA-8B-Instruct", {"layer_norm_type": None}, "'layer_norm_type' is missing"),
        ("gemma-3-1b-it", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, whi"),
        ("gemma-3-1b-it", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, w"),
        ("gemma-3-1b-it", {"use_bidirectional_attention": True}, "use_bidirectional_attention is"),
        ("gemma-3-1b-it", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu', but only"),
        ("gemma-3-1b-it", {"rope_local_base_freq": None}, "'rope_local_base_freq' is missing"),
        ("gemma-3-1b-it", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, but must be"),
        ("gemma-3-1b-it", {"rope_parameters": {"full_attention": {}}}, "say different things"),
        ("gpt-oss-20b", {"swiglu_limit": 6.0}, "swiglu_limit is 6.0, but only 7.0"),
        ("gpt-oss-20b", {"experts_per_token": 2}, "experts_per_token is 2, but only 4"),
        ("gpt-oss-20b", {"num_local_experts": 2}, "4 of 2 experts"),
        ("Olmo-3-7B-Think", {"sliding_window": None}, "'sliding_window' is missing"),
        ("Olmo-3-7B-Think", {"rope_local_base_freq": 1e4}, "rope_local_base_freq is 10000.0"),
        ("Qwen3.5-4B-DFlash", {"layer_types": None}, "says of which layers"),
        ("Qwen3.5-4B-DFlash", {"sliding_window": None}, "'sliding_window' is missing"),
        ("Qwen3.5-4B-DFlash", {"rope_theta": 5.0}, "rope_theta is 5.0 in one place and 10000000"),
        ("Qwen3.5-4B-DFlash", {"target_hidden_size": 64}, "target_hidden_size is 64, but only"),
    ],
)
def test_other_models_of_a_format_are_refused(
    name: str, fields: dict[str, Any], message: str
) -> None:
    """Field and value are named."""
    with pytest.raises(ValueError, match=message):
        translate({**CONFIGS[name], **fields})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "longrope", "factor": 2.0}, "'longrope' is not supported; what loads is default"),
        ({"type": ["yarn"]}, r"\['yarn'\] is not supported"),
        ({"type": "yarn", "factor": 4.0}, "'original_max_position_embeddings' is missing"),
        ({"type": "linear", "factor": "2"}, "factor is '2', but must be a positive"),
        ({"type": "linear", "factor": 2.0, "mscale": 1.0}, "mscale is 1.0, which is not supported"),
        ({"type": "linear", "factor": 2.0, "truncate": False}, "truncate is False, but only True"),
        ({"type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"type": "yarn", **YARN, "truncate": 0}, "truncate is 0, but must be true or false"),
    ],
)
def test_scaling_is_understood_or_refused(scaling: dict[str, Any], message: str) -> None:
    """By its kind, or by a field of it."""
    with pytest.raises(ValueError, match=message):
        translate({**CONFIGS["Qwen2-0.5B"], "rope_scaling": scaling})


def test_fields_without_a_choice_may_say_so() -> None:
    """Null, false, empty or what is always so."""
    published = CONFIGS["Qwen3-0.6B"]
    neutral = {"quantization_config": None, "num_experts": None, "a_later_field": False}
    neutral |= {"partial_rotary_factor": 1, "hidden_act": "silu", "some_layers": []}
    assert translate({**published, **neutral}) == translate(published)
