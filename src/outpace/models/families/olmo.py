"""OLMo 2: norms behind attention and MLP, and over all heads of queries and of keys."""

from __future__ import annotations

from outpace.models.families.family import BIASED, HUGGING_FACE_NAMES, STATED, Family

OLMO2 = Family(
    name="olmo2",
    about="OLMo 2: norms behind attention and MLP",
    architectures=("Olmo2ForCausalLM",),
    fields={
        **STATED,
        **BIASED,
        "qk_norm": True,
        "wide_qk_norm": True,
        "norms_after": True,
    },
    names={
        **HUGGING_FACE_NAMES,
        "blocks.{}.attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
        "blocks.{}.mlp_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
    },
)
