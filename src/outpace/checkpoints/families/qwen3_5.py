"""Qwen3.5, Qwen3.6 and Qwen3.8: gated delta layers beside gated attention; only text is read."""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.families.family import HUGGING_FACE_NAMES, IGNORABLE, Family
from outpace.checkpoints.families.hybrid import HYBRID, MIXTURE, delta_field
from outpace.checkpoints.families.hybrid_gguf import QWEN3_5_GGUF, QWEN3_5_MOE_GGUF
from outpace.checkpoints.families.hybrid_names import (
    MIXTURE_NAMES,
    SPLIT_NAMES,
    fused_experts,
    hybrid_mtp,
)
from outpace.checkpoints.families.nested_text import IMAGES, flatten_text, nest_names
from outpace.checkpoints.fields import words

IGNORED = IGNORABLE | words("mamba_ssm_dtype mtp_use_dedicated_embeddings")
UNREAD = ("model.visual.",)
"""Prefix of the tensors for images."""

QWEN3_5_TEXT = Family(
    name="qwen3_5_text",
    about="Qwen3.5 without images: gated delta layers beside gated attention",
    architectures=("Qwen3_5ForCausalLM",),
    checkpoints=("codecho/Qwen3.5-0.8B-text-only",),
    fields={**HYBRID, "delta": delta_field(grouped=False)},
    fixed={"hidden_act": "silu", "attn_output_gate": True, "output_gate_type": "swish"},
    ignored=IGNORED,
    unread=UNREAD,
    flat=flatten_text,
    names={**HUGGING_FACE_NAMES, **SPLIT_NAMES},
    gguf=QWEN3_5_GGUF,
    mtp=hybrid_mtp(HUGGING_FACE_NAMES),
)

QWEN3_5 = replace(
    QWEN3_5_TEXT,
    name="qwen3_5",
    about="Qwen3.5, Qwen3.6 and Qwen3.8 (dense), whose text is read",
    architectures=("Qwen3_5ForConditionalGeneration",),
    checkpoints=tuple(f"Qwen/Qwen3.{name}" for name in ("5-4B", "5-9B", "5-27B", "6-27B", "8-27B")),
    ignored=IGNORED | IMAGES,
    names=nest_names(QWEN3_5_TEXT.names),
    gguf=None,
)

MOE_IGNORED = words("intermediate_size router_aux_loss_coef output_router_logits")

QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    name="qwen3_5_moe_text",
    about="Qwen3.5 without images, mixtures of experts",
    architectures=("Qwen3_5MoeForCausalLM",),
    checkpoints=("codecho/Qwen3.5-35B-A3B-text-only",),
    fields={**QWEN3_5_TEXT.fields, **MIXTURE, "norm_experts": True},
    ignored=IGNORED | MOE_IGNORED,
    names={**MIXTURE_NAMES, **SPLIT_NAMES},
    fused=fused_experts("model"),
    gguf=QWEN3_5_MOE_GGUF,
    mtp=hybrid_mtp(MIXTURE_NAMES),
)

QWEN3_5_MOE = replace(
    QWEN3_5_MOE_TEXT,
    name="qwen3_5_moe",
    about="Qwen3.5 and Qwen3.6, mixtures of experts, whose text is read",
    architectures=("Qwen3_5MoeForConditionalGeneration",),
    checkpoints=(
        "Qwen/Qwen3.5-35B-A3B",
        "Qwen/Qwen3.5-122B-A10B",
        "Qwen/Qwen3.6-35B-A3B",
        "InternScience/Agents-A1",
    ),
    ignored=IGNORED | IMAGES | MOE_IGNORED,
    names=nest_names(QWEN3_5_MOE_TEXT.names),
    fused=fused_experts("model.language_model"),
    gguf=None,
)
