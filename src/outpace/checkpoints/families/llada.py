"""LLaDA (Nie et al., 2025), LLaDA-MoE and LLaDA2: bidirectional, not shifted."""

from __future__ import annotations

from operator import itemgetter

from outpace.checkpoints.families.family import (
    BIASES,
    CLASS_SUFFIXES,
    DECODER,
    EOS,
    FIXED_FIELDS,
    IGNORABLE,
    STRICT_DECODER,
    Family,
    TensorNames,
    head_dim,
    mask_id,
    with_experts,
)
from outpace.checkpoints.families.gguf_format import PAIRED_ROWS, GGUFFormat
from outpace.checkpoints.families.rotary import partial_rope
from outpace.checkpoints.fields import (
    Field,
    Fields,
    count,
    few,
    field,
    flag,
    group,
    index,
    number,
    words,
)
from outpace.decoding.target import Kind
from outpace.models.config import ExpertGroups, Rope

LLADA_STATED = {
    "activation_type": "silu",
    "block_group_size": 1,
    "block_type": "llama",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "rope": True,
}
"""Fields with only one supported value."""

LLADA_GGUF = GGUFFormat(
    architecture="llada",
    renamed={
        "hidden_size": "d_model",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "num_key_value_heads": "n_kv_heads",
        "tie_word_embeddings": "weight_tying",
    },
    stated={"attention.causal": False, "diffusion.shift_logits": False},
    implied=LLADA_STATED,
    rows=PAIRED_ROWS,
)


EOT = 126348  # `<|eot_id|>` ends the assistant's turn; config.json has only the end of text
BLOCK_NAME = "model.transformer.blocks.{}."
LLADA_NAMES: TensorNames = {
    "embedding.weight": "model.transformer.wte.weight",
    "blocks.{}.attention_norm.weight": f"{BLOCK_NAME}attn_norm.weight",
    "blocks.{}.attention.qkv.weight": tuple(f"{BLOCK_NAME}{part}_proj.weight" for part in "qkv"),
    "blocks.{}.attention.qkv.bias": tuple(f"{BLOCK_NAME}{part}_proj.bias" for part in "qkv"),
    "blocks.{}.attention.out.weight": f"{BLOCK_NAME}attn_out.weight",
    "blocks.{}.mlp_norm.weight": f"{BLOCK_NAME}ff_norm.weight",
    "blocks.{}.mlp.gate_up.weight": (f"{BLOCK_NAME}ff_proj.weight", f"{BLOCK_NAME}up_proj.weight"),
    "blocks.{}.mlp.down.weight": f"{BLOCK_NAME}ff_out.weight",
    "norm.weight": "model.transformer.ln_f.weight",
    "unembedding.weight": "model.transformer.ff_out.weight",
}

MORE_IGNORED = "alibi_bias_max attention_layer_norm_with_affine flash_attention init_cutoff_factor"
MORE_IGNORED += " init_device init_fn init_std mlp_ratio precision"

LLADA_TEMPLATE = (
    "{% for message in messages %}{% if loop.first %}<|startoftext|>{% endif %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
ROTARY = {"theta": field("rope_theta", number), "float32": field("rope_full_precision", flag, True)}


def end_tokens(published: Fields, ours: Fields) -> tuple[int, ...]:
    return (*EOS.read(published, ours), *((EOT,) if ours["vocab"] > EOT else ()))


LLADA = Family(
    name="llada",
    about="LLaDA: a diffusion model trained from scratch, bidirectional, not shifted",
    architectures=("LLaDAModelLM",),
    checkpoints=("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5"),
    compared="recorded runs of its authors' code",
    fields={
        "vocab": field("embedding_size vocab_size", count),
        "dim": field("d_model", count),
        "layers": field("n_layers", few),
        "heads": field("n_heads", few),
        "kv_heads": field("n_kv_heads", few, itemgetter("heads")),
        "head_dim": head_dim,
        "mlp": field("mlp_hidden_size", count),
        "max_length": field("max_sequence_length", count),
        "norm_eps": field("rms_norm_eps", number),
        "rope": group(Rope, ROTARY),
        "qkv_bias": field("include_qkv_bias", flag, False),
        "tied": field("weight_tying", flag),
        "shift": 0,
        "kind": Kind.DIFFUSION,
        "block": 32,
        "null_prompt": True,
        "mask_id": field("mask_token_id", index),
        "eos": Field(EOS.names, end_tokens),
    },
    fixed={},
    stated=LLADA_STATED,
    ignored=IGNORABLE | {*MORE_IGNORED.split()},
    remote={"configuration_llada.LLaDAConfig", "modeling_llada.LLaDAModelLM"},
    names=LLADA_NAMES,
    method="left_to_right",
    template=LLADA_TEMPLATE,
    gguf=LLADA_GGUF,
)


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

SHARED_EXPERTS = field("num_shared_experts", index, 0)
GROUP_SIZES = {
    "count": field("n_group", few),
    "chosen": field("topk_group", few),
    "scale": field("routed_scaling_factor", number),
}


def shared_width(published: Fields, ours: Fields) -> int:
    """Return the width of the shared experts, which form one MLP."""
    return int(SHARED_EXPERTS.read(published, ours) * ours["mlp"])


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
        "mlp": field("moe_intermediate_size", count),
        "expert_groups": group(ExpertGroups, GROUP_SIZES),
        "shared_mlp": Field(SHARED_EXPERTS.names, shared_width),
        "dense_mlp": field("intermediate_size", count),
        "precise_router": True,
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
