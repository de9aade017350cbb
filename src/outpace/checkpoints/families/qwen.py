"""Qwen2, Qwen2.5 and Qwen3, and block diffusion models made of Qwen2.5: SDLM, Fast-dLLM v2."""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.families.family import (
    BIASES,
    CLASS_SUFFIXES,
    DECODER,
    FIXED_FIELDS,
    HUGGING_FACE_NAMES,
    IGNORABLE,
    Family,
    mask_id,
    with_experts,
)
from outpace.checkpoints.families.gguf_format import GGUFFormat
from outpace.checkpoints.fields import count, few, field, flag, index, words
from outpace.decoding.target import Kind

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


SDLM = replace(
    QWEN2,
    name="sdlm",
    about="SDLM: a causal model that fills a block after its last token, adapted from Qwen2.5",
    architectures=("SDLMQwen2ForCausalLM",),
    checkpoints=("OpenGVLab/SDLM-3B-D4", "OpenGVLab/SDLM-3B-D8", "OpenGVLab/SDLM-32B-D4"),
    compared="transformers under its mask",
    fields={
        **QWEN2.fields,
        "mask_id": field("text_mask_token_id", index),
        "mask_shift": 1,
        "kind": Kind.CAUSAL_BLOCK,
        "block": field("block_size", count),
        "drawn": True,
    },
    # Whether rows of the block are causal too, in the spelling of the files and that of the code.
    fixed={**QWEN2.fixed, "casual_attn": False, "causal_attn": False},
    ignored={*QWEN2.ignored, "text_mask_token"},
    remote={"configuration_sdlm.SDLMQwen2Config", "modeling_sdlm.SDLMQwen2ForCausalLM"},
    method="block_diffusion",
    gguf=None,
)


FAST_DLLM_MASK = 151665
"""Mask token in the authors' code; their `config.json` omits it."""
# Whether a batch is trained on again with the complementary mask, in two published spellings.
FAST_DLLM_TRAINING = words("complementary_mask conplemenrary_mask")


FAST_DLLM_V2 = Family(
    name="fast_dllm_v2",
    about="Fast-dLLM v2: block diffusion, adapted from Qwen2.5, shifted",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    checkpoints=(
        "Efficient-Large-Model/Fast_dLLM_v2_1.5B",
        "Efficient-Large-Model/Fast_dLLM_v2_7B",
    ),
    compared="transformers under a mask in blocks",
    fields={
        **DECODER,
        "qkv_bias": True,
        "mask_id": mask_id(FAST_DLLM_MASK),
        "kind": Kind.BLOCK,
        "block": field("bd_size", count),
        "drawn": True,
    },
    fixed=QWEN2.fixed,
    ignored={*QWEN2.ignored, *FAST_DLLM_TRAINING},
    remote={
        "configuration.Fast_dLLM_QwenConfig",
        *(f"modeling.Fast_dLLM_Qwen{part}" for part in CLASS_SUFFIXES),
    },
    names=HUGGING_FACE_NAMES,
    method="block_diffusion",
)
