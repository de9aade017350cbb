"""DFlash drafts: Qwen3's layers between a target's embedding and head (Chen et al., 2026)."""

from __future__ import annotations

from operator import itemgetter

from outpace.checkpoints.families.family import (
    BIASED,
    DECODER,
    FIXED,
    HUGGING_FACE_NAMES,
    IGNORED,
    Family,
    without_prefix,
)
from outpace.checkpoints.families.features import COUNTED, LISTED, OWN, TARGET, feature_layers, flat
from outpace.checkpoints.families.sights import SIGHTS
from outpace.checkpoints.fields import Field, count, few, field, flag, index
from outpace.decoding.target import Kind

FUSION = f"{OWN}.input_fusion"

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
        **BIASED,
        "head_dim": field("head_dim", few, 128),
        "tied": False,
        "qk_norm": True,
        "shift": 0,
        "kind": field(FUSION, lambda value: Kind.ADDING if flag(value) else Kind.DRAFT, Kind.DRAFT),
        "mask_id": field("mask_token_id", index),
        "eos": (),
        "sights": SIGHTS,
        "feature_layers": Field((*LISTED.names, *COUNTED.names, *TARGET.names), feature_layers),
        "target_layers": field("num_target_layers", few, None),
        "block": field("block_size", count, 16),
    },
    fixed={
        **FIXED,
        "draft_vocab_size": itemgetter("vocab"),
        "target_hidden_size": itemgetter("dim"),
        "is_neox_style": True,
        "output_multiplier": 1.0,
    },
    ignored=IGNORED | {"tie_word_embeddings", "eos_token_id"},
    remote={"dflash.DFlashDraftModel"},
    flat=flat,
    names={
        **without_prefix(HUGGING_FACE_NAMES, "model."),
        "fusion.weight": "fc.weight",
        "fusion_norm.weight": "hidden_norm.weight",
        "feature_norm.weight": "feature_norm.weight",
    },
)
