"""Mistral, and Mixtral's mixtures of experts."""

from __future__ import annotations

from outpace.checkpoints.families.attention_windows import sliding_windows
from outpace.checkpoints.families.family import (
    HUGGING_FACE_NAMES,
    IGNORABLE,
    STRICT_DECODER,
    Family,
    with_experts,
)
from outpace.checkpoints.families.gguf_format import PAIRED_ROWS, GGUFFormat
from outpace.checkpoints.fields import few, field

MISTRAL = Family(
    name="mistral",
    about="Mistral: every layer attends to the last `sliding_window` tokens, or to all",
    architectures=("MistralForCausalLM",),
    checkpoints=("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-Nemo-Instruct-2407"),
    fields={**STRICT_DECODER, "windows": sliding_windows(4096)},
    names=HUGGING_FACE_NAMES,
    # Without a window; files of the architecture "llama" are read as that family.
    gguf=GGUFFormat(architecture="mistral3", implied={"sliding_window": None}, rows=PAIRED_ROWS),
)

MIXTRAL = Family(
    name="mixtral",
    about="Mixtral: a mixture of experts in every layer",
    architectures=("MixtralForCausalLM",),
    checkpoints=("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x22B-Instruct-v0.1"),
    fields={
        **STRICT_DECODER,
        "windows": sliding_windows(None),
        "experts": field("num_local_experts num_experts", few),
        "experts_per_row": field("num_experts_per_tok", few),
        "norm_experts": True,
    },
    ignored=IGNORABLE | {"router_aux_loss_coef", "router_jitter_noise", "output_router_logits"},
    names=with_experts("block_sparse_moe", "w1", "w3", "w2"),
    gguf=GGUFFormat(
        architecture="llama",
        marker="expert_count",
        renamed={"num_experts": "num_local_experts"},
        rows=PAIRED_ROWS,
    ),
)
