"""Llama 3 and what shares its format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.models.config import ModelConfig, Rope
from outpace.models.families.family import HUGGING_FACE_NAMES, Family, hugging_face_fields


def translate(config: Mapping[str, Any]) -> ModelConfig:
    """Llama's `config.json` as ours."""
    bias = config.get("attention_bias", False)
    return ModelConfig(
        family="llama",
        **dict(hugging_face_fields(config)),
        rope=Rope.of(config),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.get("mlp_bias", False),
    )


LLAMA = Family(
    name="llama",
    about="Llama 3, 3.1, 3.2: no biases, rotary scaling for long contexts",
    architectures=("LlamaForCausalLM",),
    config=translate,
    names=HUGGING_FACE_NAMES,
)
