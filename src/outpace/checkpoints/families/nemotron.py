"""Nemotron-Labs-Diffusion: Ministral 3 that also fills blocks of masks (NVIDIA, 2026).

Rows of tokens are causal and predict the next slot. Masks of the open block see all of it, and each
predicts its own slot.
"""

from __future__ import annotations

from outpace.checkpoints.families.efficient_dlm import (
    DLM_TRAINING,
    ENCODER_NAMES,
    MASKED_BLOCKS,
    PARADIGM,
)
from outpace.checkpoints.families.family import (
    BIASES,
    FIXED_FIELDS,
    IGNORABLE,
    STRICT_DECODER,
    Family,
)
from outpace.checkpoints.families.ministral_rope import flatten_ministral_rope
from outpace.checkpoints.fields import few, field, flag
from outpace.decoding.target import Kind

NEMOTRON_DIFFUSION = Family(
    name="nemotron_diffusion",
    about="Nemotron-Labs-Diffusion: a causal model that fills blocks of masks",
    architectures=("NemotronLabsDiffusionModel",),
    checkpoints=(
        "nvidia/Nemotron-Labs-Diffusion-3B-Base",
        "nvidia/Nemotron-Labs-Diffusion-3B",
        "nvidia/Nemotron-Labs-Diffusion-8B",
        "nvidia/Nemotron-Labs-Diffusion-14B",
    ),
    compared="transformers under its mask",
    fields={
        **STRICT_DECODER,
        **BIASES,
        **MASKED_BLOCKS,
        "head_dim": field("head_dim", few),
        "mlp_bias": field("mlp_bias", flag, False),
        "mask_shift": 0,
        "kind": Kind.CAUSAL_BLOCK,
    },
    fixed={**FIXED_FIELDS, **PARADIGM},
    ignored=IGNORABLE | DLM_TRAINING,
    remote={
        "configuration_nemotron_labs_diffusion.NemotronLabsDiffusionConfig",
        "modeling_nemotron_labs_diffusion.NemotronLabsDiffusionModel",
    },
    flat=flatten_ministral_rope,
    names=ENCODER_NAMES,
    method="block_diffusion",
)
