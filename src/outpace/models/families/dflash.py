"""DFlash drafts: Qwen3's layers between a target's embedding and head (Chen et al., 2026)."""

from __future__ import annotations

from operator import itemgetter

from outpace.decoding.target import Kind
from outpace.models.families.family import BIASED, DECODER, FIXED, IGNORED, Family, without_prefix
from outpace.models.families.family import HUGGING_FACE_NAMES as NAMES
from outpace.models.families.sights import SIGHTS
from outpace.models.fields import Field, Given, count, few, field, flag, index, indices, inner

OWN, NESTED = "dflash_config", ("block_size", "causal", "mask_token_id", "target_layer_ids")
LISTED = field("target_layer_ids", indices, None)
COUNTED = field("eagle_aux_hidden_state_layer_ids", indices, None)
TARGET = field("num_target_layers", few)
FUSION = f"{OWN}.input_fusion"


def flat(published: Given) -> Given:
    """The fields of `dflash_config` beside the others, where they may stand as well."""
    own = inner(published, OWN).items()
    nested = {name if name in NESTED else f"{OWN}.{name}": value for name, value in own}
    others = {name: value for name, value in published.items() if name != OWN}
    return others | {name: value for name, value in nested.items() if value is not None}


def feature_layers(given: Given, ours: Given) -> tuple[int, ...]:
    """Layers of the target, counted from 0; spread evenly where a checkpoint lists none."""
    if listed := LISTED.value(given, ours):
        return tuple(listed)
    if counted := COUNTED.value(given, ours):
        return tuple(layer - 1 for layer in counted)  # these count the embedding as layer 0
    deep, layers = TARGET.value(given, ours), ours["layers"]
    if layers == 1:
        return (deep // 2,)
    return tuple(round(1 + layer * (deep - 4) / (layers - 1)) for layer in range(layers))


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
        "kind": field(FUSION, lambda said: Kind.ADDING if flag(said) else Kind.DRAFT, Kind.DRAFT),
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
    flat=flat,
    names={
        **without_prefix(NAMES, "model."),
        "fusion.weight": "fc.weight",
        "fusion_norm.weight": "hidden_norm.weight",
        "feature_norm.weight": "feature_norm.weight",
    },
)
