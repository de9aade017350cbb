"""WeDLM: Qwen2.5 or Qwen3 that also fills masks, still causal (Liu et al., 2025).

Two kinds of rows: a token's row predicts the next slot, as in the model that it was made from; a
mask's row predicts its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.models.config import ModelConfig, Rope
from outpace.models.families.family import HUGGING_FACE_NAMES, Family, hugging_face_fields
from outpace.models.families.qwen import refuse_sliding

MASK = 151665
"""What the published models feed as a mask, named in `config.json` or not."""


def translate(config: Mapping[str, Any]) -> ModelConfig:
    """WeDLM's `config.json` as ours; one without a mask token still decodes token by token."""
    refuse_sliding(config)
    fields = dict(hugging_face_fields(config))
    if fields["mask_id"] is None and fields["vocab"] > MASK:
        fields["mask_id"] = MASK
    bias = config.get("attention_bias", True)
    return ModelConfig(
        family="wedlm",
        **fields,
        rope=Rope.of(config),
        qkv_bias=bias,
        qk_norm=config.get("qk_norm", not bias),
    )


WEDLM = Family(
    name="wedlm",
    about="WeDLM: fills masks under causal attention, adapted from Qwen2.5 or Qwen3",
    architectures=("WeDLMForCausalLM",),
    config=translate,
    names=HUGGING_FACE_NAMES,
    method="wedlm",
)
