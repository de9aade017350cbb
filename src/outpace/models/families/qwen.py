"""Qwen2, Qwen2.5 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.models.config import ModelConfig, Rope
from outpace.models.families.family import HUGGING_FACE_NAMES, Family, hugging_face_fields


def refuse_sliding(config: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a checkpoint whose layers see a sliding window."""
    if config.get("use_sliding_window"):
        raise ValueError(
            "use_sliding_window is true in config.json; only full attention is supported, "
            "so choose a checkpoint without it"
        )


def qwen2(config: Mapping[str, Any]) -> ModelConfig:
    """Qwen2's `config.json` as ours."""
    refuse_sliding(config)
    fields = dict(hugging_face_fields(config))
    return ModelConfig(family="qwen2", **fields, rope=Rope.of(config), qkv_bias=True)


def qwen3(config: Mapping[str, Any]) -> ModelConfig:
    """Qwen3's `config.json` as ours."""
    refuse_sliding(config)
    bias = config.get("attention_bias", False)
    fields = dict(hugging_face_fields(config))
    fields["head_dim"] = config.get("head_dim", 128)
    return ModelConfig(
        family="qwen3", **fields, rope=Rope.of(config), qk_norm=True, qkv_bias=bias, out_bias=bias
    )


QWEN2 = Family(
    name="qwen2",
    about="Qwen2 and Qwen2.5: biases on query, key and value",
    architectures=("Qwen2ForCausalLM",),
    config=qwen2,
    names=HUGGING_FACE_NAMES,
)

QWEN3 = Family(
    name="qwen3",
    about="Qwen3 (dense): normed queries and keys",
    architectures=("Qwen3ForCausalLM",),
    config=qwen3,
    names=HUGGING_FACE_NAMES,
)
