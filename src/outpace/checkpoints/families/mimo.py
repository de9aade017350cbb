"""MiMo-7B: Qwen2's layers with a head for multi-token prediction."""

from __future__ import annotations

from outpace.checkpoints.families.family import (
    FIXED_FIELDS,
    HUGGING_FACE_NAMES,
    IGNORABLE,
    STRICT_DECODER,
    Family,
    MTPFormat,
    replace_prefix,
)
from outpace.checkpoints.families.mtp import mtp_field, mtp_names
from outpace.checkpoints.fields import words

HEAD = "model.mtp_layers.{}."

MIMO = Family(
    name="mimo",
    about="MiMo-7B: Qwen2 with a head for multi-token prediction",
    architectures=("MiMoForCausalLM",),
    checkpoints=("XiaomiMiMo/MiMo-7B-Base", "XiaomiMiMo/MiMo-7B-SFT", "XiaomiMiMo/MiMo-7B-RL"),
    compared="Qwen2 of transformers",
    fields={
        **STRICT_DECODER,
        "qkv_bias": True,
        "mtp": mtp_field("num_nextn_predict_layers", 0, states_first=True, before_norm=True),
    },
    fixed={**FIXED_FIELDS, "attention_bias": True},
    ignored=IGNORABLE | {"sliding_window"},  # not used without `use_sliding_window`
    remote=words("configuration_mimo.MiMoConfig modeling_mimo.MiMoModel")
    | words("modeling_mimo.MiMoForCausalLM"),
    names=HUGGING_FACE_NAMES,
    mtp=MTPFormat(
        prefix=HEAD,
        names=mtp_names(
            replace_prefix(HUGGING_FACE_NAMES, "model.layers.{}.", HEAD),
            HEAD,
            norm="final_layernorm",
            fusion="input_proj",
            embedding_norm="token_layernorm",
            state_norm="hidden_layernorm",
        ),
    ),
)
