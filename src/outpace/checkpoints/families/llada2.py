"""LLaDA2: block diffusion with a mixture of experts, adapted from Ling 2 (Bie et al., 2025)."""

from __future__ import annotations

from outpace.checkpoints.families.family import DECODER, IGNORABLE, Family, TensorNames, mask_id
from outpace.checkpoints.families.grouped_experts import grouped_experts
from outpace.checkpoints.families.partial import partial_rope
from outpace.checkpoints.fields import few, field, index, number, words
from outpace.decoding.target import Kind

# Mask and block length are from the authors' code; their `config.json` has neither.
LLADA2_MASK, LLADA2_BLOCK, CODE = 156895, 32, "llada2_moe.LLaDA2Moe"
LAYER = "model.layers.{}."
MLP_NAME, EXPERT, SHARED = (f"{LAYER}mlp.{part}" for part in ("", "experts.{}.", "shared_experts."))
GATED = ("gate_proj.weight", "up_proj.weight")
LLADA2_NAMES: TensorNames = {
    "embedding.weight": "model.word_embeddings.weight",
    "blocks.{}.attention_norm.weight": f"{LAYER}input_layernorm.weight",
    "blocks.{}.attention.qkv.weight": f"{LAYER}attention.query_key_value.weight",
    "blocks.{}.attention.q_norm.weight": f"{LAYER}attention.query_layernorm.weight",
    "blocks.{}.attention.k_norm.weight": f"{LAYER}attention.key_layernorm.weight",
    "blocks.{}.attention.out.weight": f"{LAYER}attention.dense.weight",
    "blocks.{}.mlp_norm.weight": f"{LAYER}post_attention_layernorm.weight",
    "blocks.{}.mlp.gate_up.weight": tuple(MLP_NAME + part for part in GATED),
    "blocks.{}.mlp.down.weight": f"{MLP_NAME}down_proj.weight",
    "blocks.{}.mlp.router.weight": f"{MLP_NAME}gate.weight",
    "blocks.{}.mlp.preference": f"{MLP_NAME}gate.expert_bias",
    "blocks.{}.mlp.experts.{}.gate_up.weight": tuple(EXPERT + part for part in GATED),
    "blocks.{}.mlp.experts.{}.down.weight": f"{EXPERT}down_proj.weight",
    "blocks.{}.mlp.shared.gate_up.weight": tuple(SHARED + part for part in GATED),
    "blocks.{}.mlp.shared.down.weight": f"{SHARED}down_proj.weight",
    "norm.weight": "model.norm.weight",
    "unembedding.weight": "lm_head.weight",
}

LLADA2 = Family(
    name="llada2",
    about="LLaDA2: block diffusion, a mixture of experts, not shifted",
    architectures=("LLaDA2MoeModelLM",),
    checkpoints=("inclusionAI/LLaDA2.0-mini", "inclusionAI/LLaDA2.1-mini", "Zigeng/DMax-Math-16B"),
    compared="transformers under a mask in blocks",
    fields={
        **DECODER,
        "kv_heads": field("num_key_value_heads", few),
        "norm_eps": field("rms_norm_eps", number),
        "rope": partial_rope(0.5),
        "experts": field("num_experts", few),
        "experts_per_row": field("num_experts_per_tok", few),
        "norm_experts": lambda ours: ours["experts_per_row"] > 1,
        **grouped_experts(field("num_shared_experts", index, 0)),
        "dense_layers": field("first_k_dense_replace", index, 0),
        **dict.fromkeys(("qk_norm", "drawn"), True),
        "shift": 0,
        "kind": Kind.BLOCK,
        "mask_id": mask_id(LLADA2_MASK),
        "block": LLADA2_BLOCK,
    },
    fixed={"hidden_act": "silu", "score_function": "sigmoid", "router_dtype": "fp32"}
    | {"rotary_dim": lambda ours: int(ours["head_dim"] * ours["rope"].share)}
    | dict.fromkeys(("norm_topk_prob", "moe_router_enable_expert_bias", "use_qk_norm"), True),
    ignored=IGNORABLE | words("_moe_implementation output_router_logits sliding_window"),
    remote=words(f"configuration_{CODE}Config modeling_{CODE}Model modeling_{CODE}ModelLM"),
    names=LLADA2_NAMES,
    method="block_diffusion",
)
