"""NVIDIA's diffusion models: Efficient-DLM, and Nemotron-Labs-Diffusion, which is also causal.

Rows of tokens are causal and predict the next slot. Masks of the open block see all of it, and each
predicts its own slot.
"""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.families.family import (
    BIASES,
    FIXED_FIELDS,
    HUGGING_FACE_NAMES,
    IGNORABLE,
    STRICT_DECODER,
    Family,
    TensorNames,
    replace_prefix,
)
from outpace.checkpoints.families.qwen import QWEN3
from outpace.checkpoints.families.rotary import flatten_ministral_rope
from outpace.checkpoints.fields import Fields, count, few, field, flag, index, words
from outpace.decoding.target import Kind

ENCODER_NAMES: TensorNames = {
    **replace_prefix(HUGGING_FACE_NAMES, "model.", "encoder."),
    "unembedding.weight": "diffusion_head.weight",
}
"""Names of tensors in NVIDIA's diffusion models."""

MASKED_BLOCKS: Fields = {
    "mask_id": field("mask_token_id", index),
    "block": field("block_size", count),
    "drawn": True,
}
PARADIGM: Fields = {"dlm_paradigm": "bidirectional"}
DLM_TRAINING = words(
    """
    adaptive_mask_rate ar_loss_weight diff_loss_weight dlm_loss_weight dp_varying_mask_ratio
    enforce_mask intl_mask multi_sampling prefix_ratio random_length_prob tok_mask_half_life_ratio
    """
)
"""Published fields of losses and noise, of both families."""

EFFICIENT_DLM = replace(
    QWEN3,
    name="efficient_dlm",
    about="Efficient-DLM: block diffusion, adapted from Qwen3, not shifted",
    architectures=("EfficientDLM",),
    checkpoints=("nvidia/Efficient-DLM-4B", "nvidia/Efficient-DLM-8B"),
    compared="transformers under a mask in blocks",
    fields={**QWEN3.fields, **MASKED_BLOCKS, "shift": 0, "kind": Kind.BLOCK},
    # Logits are shifted in the type "dream"; other layers than those of the encoder are causal.
    fixed={**QWEN3.fixed, **PARADIGM, "dlm_arch": "encoder", "dlm_type": "llada"}
    | dict.fromkeys(("num_ar_layers", "num_diffusion_layers"), 0),
    ignored={*QWEN3.ignored, *DLM_TRAINING},
    remote={"configuration_edlm.EfficientDLMConfig", "modeling_edlm.EfficientDLM"},
    names=ENCODER_NAMES,
    method="block_diffusion",
    gguf=None,
)


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
