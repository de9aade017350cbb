"""WeDLM: Qwen2.5 or Qwen3 adapted to fill masks under causal attention (Liu et al., 2025).

The row of a token predicts the next slot, as in the original model; the row of a mask predicts its
own slot.
"""

from __future__ import annotations

from outpace.checkpoints.families.family import (
    CLASS_SUFFIXES,
    DECODER,
    HUGGING_FACE_NAMES,
    Family,
    mask_id,
)
from outpace.checkpoints.families.qwen import QWEN_IGNORED
from outpace.checkpoints.fields import field, flag

WEDLM_MASK = 151665
"""Mask token of the published models, which `config.json` may omit."""


WEDLM = Family(
    name="wedlm",
    about="WeDLM: fills masks under causal attention, adapted from Qwen2.5 or Qwen3",
    architectures=("WeDLMForCausalLM",),
    checkpoints=("tencent/WeDLM-7B-Instruct", "tencent/WeDLM-8B", "tencent/WeDLM-8B-Instruct"),
    compared="recorded runs of its authors' code",
    fields={
        **DECODER,
        "mask_id": mask_id(WEDLM_MASK),
        "qkv_bias": field("attention_bias", flag, True),
        "qk_norm": field("qk_norm", flag, lambda ours: not ours["qkv_bias"]),
    },
    ignored=QWEN_IGNORED,
    remote={
        "configuration_wedlm.WeDLMConfig",
        *(f"modeling_wedlm.WeDLM{part}" for part in CLASS_SUFFIXES),
    },
    names=HUGGING_FACE_NAMES,
    method="wedlm",
)
