"""LLaDA: Llama without a causal mask and without a shift, under OLMo's names (Nie et al., 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.models.config import ModelConfig, Rope
from outpace.models.families.family import Family, Names

EOT = 126348  # `<|eot_id|>` ends the assistant's turn; config.json names only the end of the text
BLOCK = "model.transformer.blocks.{}."
NAMES: Names = {
    "embedding.weight": "model.transformer.wte.weight",
    "blocks.{}.attention_norm.weight": f"{BLOCK}attn_norm.weight",
    "blocks.{}.attention.qkv.weight": tuple(f"{BLOCK}{part}_proj.weight" for part in "qkv"),
    "blocks.{}.attention.qkv.bias": tuple(f"{BLOCK}{part}_proj.bias" for part in "qkv"),
    "blocks.{}.attention.out.weight": f"{BLOCK}attn_out.weight",
    "blocks.{}.mlp_norm.weight": f"{BLOCK}ff_norm.weight",
    "blocks.{}.mlp.gate_up.weight": (f"{BLOCK}ff_proj.weight", f"{BLOCK}up_proj.weight"),
    "blocks.{}.mlp.down.weight": f"{BLOCK}ff_out.weight",
    "norm.weight": "model.transformer.ln_f.weight",
    "unembedding.weight": "model.transformer.ff_out.weight",
}

WITH = {"block_type": "llama", "block_group_size": 1, "activation_type": "silu", "rope": True}
WITH |= {"layer_norm_type": "rms", "layer_norm_with_affine": True}
WITHOUT: tuple[str, ...] = ("alibi", "attention_layer_norm", "bias_for_layer_norm")
WITHOUT += ("include_bias", "input_emb_norm", "multi_query_attention", "scale_logits")

TEMPLATE = (
    "{% for message in messages %}{% if loop.first %}<|startoftext|>{% endif %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def translate(config: Mapping[str, Any]) -> ModelConfig:
    """LLaDA's `config.json` as ours; `ValueError` for what only others of OLMo's format have."""
    for name, value in {**WITH, **dict.fromkeys(WITHOUT, False)}.items():
        if (config.get(name) or False) != value:
            raise ValueError(f"{name} {config.get(name)!r} is not supported, only {value!r}")
    if config.get("mask_token_id") is None:
        raise ValueError("config.json of a LLaDA model must name its mask_token_id")
    heads, eos = config["n_heads"], config["eos_token_id"]
    vocab = config.get("embedding_size") or config["vocab_size"]
    return ModelConfig(
        family="llada",
        architecture=config["architectures"][0],
        vocab=vocab,
        dim=config["d_model"],
        layers=config["n_layers"],
        heads=heads,
        kv_heads=config.get("n_kv_heads") or heads,
        head_dim=config["d_model"] // heads,
        mlp=config.get("mlp_hidden_size") or config["mlp_ratio"] * config["d_model"],
        max_length=config["max_sequence_length"],
        norm_eps=config["rms_norm_eps"],
        rope=Rope(theta=config["rope_theta"], float32=config.get("rope_full_precision", True)),
        qkv_bias=config.get("include_qkv_bias", False),
        tied=config["weight_tying"],
        shift=0,
        bidirectional=True,
        mask_id=config["mask_token_id"],
        eos=(eos, EOT) if vocab > EOT else (eos,),
        source=config,
    )


LLADA = Family(
    name="llada",
    about="LLaDA: a diffusion model trained from scratch, bidirectional, not shifted",
    architectures=("LLaDAModelLM",),
    config=translate,
    names=NAMES,
    native={"order": "confidence", "block": 32, "null_prompt": True},
    method="left_to_right",
    template=TEMPLATE,
)
