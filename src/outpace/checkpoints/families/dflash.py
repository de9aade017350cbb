"""DFlash drafts: Qwen3's layers between a target's embedding and head (Chen et al., 2026)."""

from __future__ import annotations

from operator import itemgetter

from outpace.checkpoints.families.attention_windows import ATTENTION_WINDOWS
from outpace.checkpoints.families.draft_gguf import DFLASH_GGUF
from outpace.checkpoints.families.family import (
    BIASES,
    DECODER,
    FIXED_FIELDS,
    HUGGING_FACE_NAMES,
    IGNORABLE,
    Family,
    replace_prefix,
)
from outpace.checkpoints.families.features import (
    AUX_LAYER_IDS,
    DFLASH_CONFIG,
    NUM_TARGET_LAYERS,
    TARGET_LAYER_IDS,
    dflash_feature_layers,
    flatten_dflash,
)
from outpace.checkpoints.fields import Field, count, few, field, flag, index
from outpace.decoding.target import Kind

INPUT_FUSION = f"{DFLASH_CONFIG}.input_fusion"

DFLASH = Family(
    name="dflash",
    about="DFlash: a draft that reads the hidden states of its target",
    architectures=("DFlashDraftModel",),
    checkpoints=(
        "z-lab/Qwen3-4B-DFlash-b16",
        "z-lab/Qwen3-8B-DFlash-b16",
        "z-lab/Qwen3.5-4B-DFlash",
    ),
    compared="recorded runs of its authors' code",
    fields={
        **DECODER,
        **BIASES,
        "head_dim": field("head_dim", few, 128),
        "tied": False,
        "qk_norm": True,
        "shift": 0,
        "kind": field(
            INPUT_FUSION,
            lambda value: Kind.DFLASH_FUSED if flag(value) else Kind.DFLASH,
            Kind.DFLASH,
        ),
        "mask_id": field("mask_token_id", index),
        "eos": (),
        "sights": ATTENTION_WINDOWS,
        "feature_layers": Field(
            (*TARGET_LAYER_IDS.names, *AUX_LAYER_IDS.names, *NUM_TARGET_LAYERS.names),
            dflash_feature_layers,
        ),
        "target_layers": field("num_target_layers", few, None),
        "block": field("block_size", count, 16),
    },
    fixed={
        **FIXED_FIELDS,
        "draft_vocab_size": itemgetter("vocab"),
        "target_hidden_size": itemgetter("dim"),
        "is_neox_style": True,
        "output_multiplier": 1.0,
    },
    ignored=IGNORABLE | {"tie_word_embeddings", "eos_token_id"},
    remote={"dflash.DFlashDraftModel"},
    flat=flatten_dflash,
    names={
        **replace_prefix(HUGGING_FACE_NAMES, "model."),
        "fusion.weight": "fc.weight",
        "fusion_norm.weight": "hidden_norm.weight",
        "feature_norm.weight": "feature_norm.weight",
    },
    gguf=DFLASH_GGUF,
)
