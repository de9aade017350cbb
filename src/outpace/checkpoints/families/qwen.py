"""Qwen2, Qwen2.5, Qwen3, and Qwen3's mixtures of experts."""

from __future__ import annotations

from outpace.checkpoints.families.family import (
    BIASES,
    DECODER,
    FIXED_FIELDS,
    HUGGING_FACE_NAMES,
    IGNORABLE,
    Family,
    with_experts,
)
from outpace.checkpoints.families.gguf_format import GGUFFormat
from outpace.checkpoints.fields import count, few, field, flag

# A window only matters if `use_sliding_window` is true, which is not supported. Chunked attention
# only matters beyond the first chunk, which is longer than the context of other checkpoints.
QWEN_IGNORED = IGNORABLE | {"sliding_window", "dual_chunk_attention_config"}

QWEN2 = Family(
    name="qwen2",
    about="Qwen2 and Qwen2.5: biases on query, key and value",
    architectures=("Qwen2ForCausalLM",),
    checkpoints=(
        "Qwen/Qwen2-0.5B",
        "Qwen/Qwen2.5-0.5B-Instruct",
        "Qwen/Qwen2.5-7B-Instruct",
        "Qwen/Qwen2.5-7B-Instruct-1M",
    ),
    fields={**DECODER, "qkv_bias": True},
    fixed={**FIXED_FIELDS, "attention_bias": True},
    ignored=QWEN_IGNORED,
    names=HUGGING_FACE_NAMES,
    gguf=GGUFFormat(architecture="qwen2"),
)

QWEN3 = Family(
    name="qwen3",
    about="Qwen3 (dense): normed queries and keys",
    architectures=("Qwen3ForCausalLM",),
    checkpoints=(
        *("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B"),
        "Qwen/Qwen3-32B",
    ),
    fields={**DECODER, **BIASES, "head_dim": field("head_dim", few, 128), "qk_norm": True},
    ignored=QWEN_IGNORED,
    names=HUGGING_FACE_NAMES,
    gguf=GGUFFormat(architecture="qwen3"),
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    about="Qwen3, mixtures of experts in every layer",
    architectures=("Qwen3MoeForCausalLM",),
    checkpoints=("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen/Qwen3-235B-A22B"),
    fields={
        **QWEN3.fields,
        "head_dim": DECODER["head_dim"],
        "kv_heads": field("num_key_value_heads", few),
        "mlp": field("moe_intermediate_size", count),
        "experts": field("num_experts num_local_experts", few),
        "experts_per_row": field("num_experts_per_tok", few),
        "norm_experts": field("norm_topk_prob", flag, False),
    },
    fixed={**FIXED_FIELDS, "decoder_sparse_step": 1},
    ignored=QWEN_IGNORED | {"intermediate_size", "router_aux_loss_coef", "output_router_logits"},
    names=with_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    gguf=GGUFFormat(architecture="qwen3moe"),
)
