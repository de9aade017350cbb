"""EAGLE-3, DFlash and DSpark drafts as the library speculators writes them, with nested fields."""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.families.dflash import CHAIN_FIELDS, DFLASH, DSPARK_HEADS, read_chain
from outpace.checkpoints.families.eagle import EAGLE
from outpace.checkpoints.families.family import HUGGING_FACE_NAMES, replace_prefix
from outpace.checkpoints.fields import (
    Field,
    Fields,
    choice,
    count,
    field,
    flag,
    inner,
    merge_fields,
    parse_value,
    some_indices,
    text,
)
from outpace.decoding.target import Kind

LAYER_CONFIG, SPECULATOR_TYPE, SPECULATORS_CONFIG = (
    "transformer_layer_config",
    "speculators_model_type",
    "speculators_config",
)
SPECULATOR_ALGORITHM, NON_CAUSAL_WINDOW = (
    f"{SPECULATORS_CONFIG}.algorithm",
    "sliding_window_non_causal",
)
ROW_SHIFTS = {False: 0, True: 1}
"""Values of `sample_from_anchor`, and the slots from a row to the one that it predicts."""
LAYER_TYPES = {"llama": False, "qwen3": True}
"""Types of layers, and whether their queries and keys are normed."""
SPECULATOR_LAYERS = field("aux_hidden_state_layer_ids", some_indices)
SPECULATOR_IGNORED = {*EAGLE.ignored, "max_anchors", "speculators_version"}
DRAFT_VOCABULARY = {
    "draft_vocab": field("draft_vocab_size", count, 32_000),
    "target_head": field("target_head", flag, False),
    "target_fingerprint": field("target_fingerprint", text, None),
}


def flatten_speculator(published: Fields) -> Fields:
    """Move the fields of the layers to the top level; decoding settings are not read."""
    outer = {
        name: value
        for name, value in published.items()
        if name not in (LAYER_CONFIG, SPECULATORS_CONFIG)
    }
    layer, algorithm = (
        inner(published, LAYER_CONFIG),
        inner(published, SPECULATORS_CONFIG).get("algorithm"),
    )
    own = {
        name: value
        for name, value in layer.items()
        if name not in SPECULATOR_IGNORED & outer.keys()
    }
    return {
        **merge_fields(own, outer),
        "model_type": layer.get("model_type"),
        SPECULATOR_ALGORITHM: algorithm,
    }


def flatten_with_windows(published: Fields) -> Fields:
    """Flatten, and translate attention within a block to the field of a DFlash draft."""
    flattened = dict(flatten_speculator(published))
    value = flattened.pop(NON_CAUSAL_WINDOW, None)
    bidirectional = value is not None and parse_value(NON_CAUSAL_WINDOW, value, flag)
    return {**flattened, "is_causal": False} if bidirectional else flattened


def speculator_feature_layers(published: Fields, ours: Fields) -> tuple[int, ...]:
    """Return the target layers that are read, from 0; in the published field 0 is the embedding."""
    return tuple(layer - 1 for layer in SPECULATOR_LAYERS.read(published, ours))


SPECULATOR_SHARED: Fields = {
    "compared": "the same weights in the plain format",
    "ignored": SPECULATOR_IGNORED,
}
EAGLE_SPECULATOR = replace(
    EAGLE,
    **SPECULATOR_SHARED,
    name="eagle_speculator",
    about="EAGLE-3 as the library speculators writes it",
    architectures=("Eagle3DraftModel", "Eagle3Speculator"),
    checkpoints=("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",),
    aliases={},
    fields={**EAGLE.fields, **DRAFT_VOCABULARY, "qk_norm": field("model_type", choice(LAYER_TYPES))}
    | {"own_embedding": field("embed_requires_grad", flag, False)},
    fixed={**EAGLE.fixed, SPECULATOR_ALGORITHM: "eagle3"},
    stated={**EAGLE.stated, SPECULATOR_TYPE: "eagle3"},
    remote={f"{module}.Eagle3SpeculatorConfig" for module in ("config", "eagle3")},
    flat=flatten_speculator,
    names={
        **EAGLE.names,
        **replace_prefix(HUGGING_FACE_NAMES, "model."),
        "blocks.{}.hidden_norm.weight": "layers.{}.hidden_norm.weight",
    },
)

DFLASH_LAYERS = {
    "feature_layers": Field(SPECULATOR_LAYERS.names, speculator_feature_layers),
    "target_layers": None,
}
DFLASH_SPECULATOR = replace(
    DFLASH,
    **SPECULATOR_SHARED,
    name="dflash_speculator",
    about="DFlash as the library speculators writes it",
    architectures=("DFlashSpeculator",),
    checkpoints=("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash",),
    aliases={"DFlashDraftModel": SPECULATOR_TYPE},
    fields={**DFLASH.fields, **DRAFT_VOCABULARY, **DFLASH_LAYERS, "kind": Kind.DFLASH}
    | {
        "block": field("block_size", count, 8),
        "shift": field("sample_from_anchor", choice(ROW_SHIFTS), 0),
    },
    fixed={name: value for name, value in DFLASH.fixed.items() if name != "draft_vocab_size"}
    | {SPECULATOR_ALGORITHM: "dflash"},
    stated={SPECULATOR_TYPE: "dflash"},
    remote={"config.DFlashSpeculatorConfig"},
    flat=flatten_with_windows,
    names={**DFLASH.names, "d2t": "d2t", "t2d": "t2d"},
)

DSPARK_SPECULATOR = replace(
    DFLASH_SPECULATOR,
    name="dspark_speculator",
    about="DSpark as the library speculators writes it",
    architectures=("DSparkSpeculator",),
    checkpoints=("RedHatAI/GLM-5.2-speculator.dspark-preview",),
    aliases={"DSparkDraftModel": SPECULATOR_TYPE},
    fields={
        **DFLASH_SPECULATOR.fields,
        "shift": field("sample_from_anchor", choice(ROW_SHIFTS), 1),
        "chain": Field(CHAIN_FIELDS, read_chain),
    },
    fixed={
        **DFLASH_SPECULATOR.fixed,
        SPECULATOR_ALGORITHM: "dspark",
        "markov_head_type": "vanilla",
    },
    stated={SPECULATOR_TYPE: "dspark"},
    remote={"config.DSparkSpeculatorConfig"},
    names={**DFLASH_SPECULATOR.names, **DSPARK_HEADS},
)
