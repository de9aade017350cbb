"""Fast-dLLM v2: Qwen2.5 adapted to attend to whole blocks, shifted as Qwen (Wu et al., 2025)."""

from __future__ import annotations

from outpace.checkpoints.families.family import (
    CLASS_SUFFIXES,
    DECODER,
    HUGGING_FACE_NAMES,
    Family,
    mask_id,
)
from outpace.checkpoints.families.qwen import QWEN2
from outpace.checkpoints.fields import count, field, words
from outpace.decoding.target import Kind

FAST_DLLM_MASK = 151665
"""Mask token in the authors' code; their `config.json` omits it."""
# Whether a batch is trained on again with the complementary mask, in two published spellings.
FAST_DLLM_TRAINING = words("complementary_mask conplemenrary_mask")


FAST_DLLM_V2 = Family(
    name="fast_dllm_v2",
    about="Fast-dLLM v2: block diffusion, adapted from Qwen2.5, shifted",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    checkpoints=(
        "Efficient-Large-Model/Fast_dLLM_v2_1.5B",
        "Efficient-Large-Model/Fast_dLLM_v2_7B",
    ),
    compared="transformers under a mask in blocks",
    fields={
        **DECODER,
        "qkv_bias": True,
        "mask_id": mask_id(FAST_DLLM_MASK),
        "kind": Kind.BLOCK,
        "block": field("bd_size", count),
        "drawn": True,
    },
    fixed=QWEN2.fixed,
    ignored={*QWEN2.ignored, *FAST_DLLM_TRAINING},
    remote={
        "configuration.Fast_dLLM_QwenConfig",
        *(f"modeling.Fast_dLLM_Qwen{part}" for part in CLASS_SUFFIXES),
    },
    names=HUGGING_FACE_NAMES,
    method="block_diffusion",
)
