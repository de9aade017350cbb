"""Dream: Qwen2.5 made bidirectional, which keeps Qwen's shift (Ye et al., 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.models.config import ModelConfig, Rope
from outpace.models.families.family import HUGGING_FACE_NAMES, Family, hugging_face_fields

TEMPLATE = (
    "{% if messages[0].role != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def translate(config: Mapping[str, Any]) -> ModelConfig:
    """Dream's `config.json` as ours."""
    if config.get("mask_token_id") is None:
        raise ValueError("config.json of a Dream model must name its mask_token_id")
    fields = dict(hugging_face_fields(config))
    return ModelConfig(
        family="dream", **fields, rope=Rope.of(config), qkv_bias=True, bidirectional=True
    )


DREAM = Family(
    name="dream",
    about="Dream: a diffusion model adapted from Qwen2.5, bidirectional, shifted",
    architectures=("DreamModel",),
    config=translate,
    names=HUGGING_FACE_NAMES,
    method="left_to_right",
    temperature=0.2,
    top_p=0.95,
    native={"order": "entropy", "eps": 1e-3, "drawn": True},
    template=TEMPLATE,
)
