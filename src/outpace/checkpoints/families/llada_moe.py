"""LLaDA-MoE: a diffusion model with a mixture of experts, not shifted (Zhu et al., 2025)."""

from __future__ import annotations

from outpace.checkpoints.families.family import (
    BIASES,
    CLASS_SUFFIXES,
    FIXED_FIELDS,
    IGNORABLE,
    STRICT_DECODER,
    Family,
    head_dim,
    mask_id,
    with_experts,
)
from outpace.checkpoints.fields import count, few, field, flag, words
from outpace.decoding.target import Kind

MASK = 156895
"""Mask token in the authors' code; their `config.json` omits it."""


LLADA_MOE = Family(
    name="llada_moe",
    about="LLaDA-MoE: a diffusion model with experts in every layer, bidirectional, not shifted",
    architectures=("LLaDAMoEModelLM",),
    checkpoints=(
        "inclusionAI/LLaDA-MoE-7B-A1B-Base",
        "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
        "inclusionAI/LLaDA-MoE-7B-A1B-Instruct-TD",
    ),
    compared="transformers without a causal mask",
    fields={
        **STRICT_DECODER,
        **BIASES,
        "head_dim": head_dim,
        "mlp": field("expert_intermediate_size", count),
        "experts": field("num_experts", few),
        "experts_per_row": field("num_experts_per_tok", few),
        "qk_norm": field("qk_layernorm", flag),
        "tied": field("tie_word_embeddings", flag, False),
        "shift": 0,
        "kind": Kind.DIFFUSION,
        "block": 32,
        "mask_id": mask_id(MASK),
    },
    fixed={
        **FIXED_FIELDS,
        "moe_layer_freq": lambda ours: [1] * ours["layers"],
        "moe_router_score_function": "softmax",
        "routed_scaling_factor": 1,
    },
    # Layers without experts would have the dense size; the authors' code ignores `norm_topk_prob`.
    ignored=IGNORABLE
    | words("dense_intermediate_size norm_topk_prob output_router_logits router_aux_loss_coef"),
    remote={
        "configuration_lladamoe.LLaDAConfig",
        *(f"modeling_lladamoe.LLaDAMoE{part}" for part in (*CLASS_SUFFIXES, "ModelLM")),
    },
    names=with_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    method="diffusion",
)
