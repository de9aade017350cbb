"""Gemma 4: wider heads in global layers; shared keys and embeddings per layer, or experts.

Of models that also read images and sound the text is read.
"""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.families.beside_experts import BESIDE_EXPERTS
from outpace.checkpoints.families.family import BIASES, IGNORABLE, STRICT_DECODER, Family
from outpace.checkpoints.families.gemma4_names import GEMMA4_NAMES, MODALITIES, UNREAD
from outpace.checkpoints.families.global_heads import GLOBAL_HEADS
from outpace.checkpoints.families.nested_text import flatten_text, nest_names
from outpace.checkpoints.families.partial import SPREAD_ROPE
from outpace.checkpoints.families.ropes import sliding_rope
from outpace.checkpoints.families.uneven import CAUSAL_TEXT, LAYER_INPUT, SHARED_KEYS
from outpace.checkpoints.families.windows import alternating_windows
from outpace.checkpoints.fields import few, field, flag, number

LATER = "mask_id", "rope", "mlp"
"""Fields that are not read, or read after others."""

GEMMA4_TEXT = Family(
    name="gemma4_text",
    about="Gemma 4 without images and sound",
    architectures=("Gemma4ForCausalLM",),
    checkpoints=("principled-intelligence/gemma-4-E2B-it-text-only",),
    fields={
        **{name: each for name, each in STRICT_DECODER.items() if name not in LATER},
        **BIASES,
        "kind": CAUSAL_TEXT,
        "head_dim": field("head_dim", few),
        "tied": field("tie_word_embeddings", flag, True),
        "sights": alternating_windows(6),
        "global_heads": GLOBAL_HEADS,
        **BESIDE_EXPERTS,
        "shared_keys": SHARED_KEYS,
        "layer_input": LAYER_INPUT,
        "layer_scale": True,
        "rope": SPREAD_ROPE,
        "local_rope": sliding_rope("rope_local_base_freq"),
        "query_factor": lambda ours: ours["head_dim"] ** 0.5,
        "qk_norm": True,
        "value_norm": True,
        "norms": "around",
        "activation": "gelu_tanh",
        "embedding_scale": lambda ours: ours["dim"] ** 0.5,
        "logit_cap": field("final_logit_softcapping", number, 0.0),
    },
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    names=GEMMA4_NAMES,
)
GEMMA4 = replace(
    GEMMA4_TEXT,
    name="gemma4",
    about="Gemma 4, whose text is read",
    architectures=("Gemma4ForConditionalGeneration",),
    checkpoints=(
        "google/gemma-4-31B-it",
        "google/gemma-4-26B-A4B-it",
        "google/gemma-4-E4B-it",
        "google/gemma-4-E2B-it",
    ),
    ignored=IGNORABLE | MODALITIES,
    unread=UNREAD,
    flat=flatten_text,
    names=nest_names(GEMMA4_TEXT.names),
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="gemma4_unified",
    about="Gemma 4 (12B), whose text is read",
    architectures=("Gemma4UnifiedForConditionalGeneration",),
    checkpoints=("google/gemma-4-12B-it", "google/gemma-4-12B"),
    fields={**GEMMA4.fields, "layer_input": 0},
    fixed={**GEMMA4.fixed, "hidden_size_per_layer_input": 0},
    ignored=IGNORABLE | MODALITIES | {"vocab_size_per_layer_input"},
)
