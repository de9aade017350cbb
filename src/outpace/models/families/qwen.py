"""Qwen2, Qwen2.5 and Qwen3."""

from __future__ import annotations

from outpace.models.families.family import (
    BIASED,
    DECODER,
    FIXED,
    HUGGING_FACE_NAMES,
    IGNORED,
    Family,
)
from outpace.models.fields import few, field

# A window counts where `use_sliding_window` is true, which is refused; chunks of attention count
# beyond the first, which is longer than what other checkpoints can see.
QWEN_IGNORED = IGNORED | {"sliding_window", "dual_chunk_attention_config"}

QWEN2 = Family(
    name="qwen2",
    about="Qwen2 and Qwen2.5: biases on query, key and value",
    architectures=("Qwen2ForCausalLM",),
    fields={**DECODER, "qkv_bias": True},
    fixed={**FIXED, "attention_bias": True},
    ignored=QWEN_IGNORED,
    names=HUGGING_FACE_NAMES,
)

QWEN3 = Family(
    name="qwen3",
    about="Qwen3 (dense): normed queries and keys",
    architectures=("Qwen3ForCausalLM",),
    fields={**DECODER, **BIASED, "head_dim": field("head_dim", few, 128), "qk_norm": True},
    ignored=QWEN_IGNORED,
    names=HUGGING_FACE_NAMES,
)
