"""The nested fields of drafts written by the library speculators."""

from __future__ import annotations

from typing import Any

from outpace.checkpoints.families.eagle import EAGLE
from outpace.checkpoints.fields import (
    Fields,
    count,
    field,
    flag,
    inner,
    merge_fields,
    parse_value,
    some_indices,
)

LAYER_CONFIG, SPECULATOR_TYPE, SPECULATORS_CONFIG = (
    "transformer_layer_config",
    "speculators_model_type",
    "speculators_config",
)
SPECULATOR_ALGORITHM, NON_CAUSAL_WINDOW = (
    f"{SPECULATORS_CONFIG}.algorithm",
    "sliding_window_non_causal",
)
SPECULATOR_LAYERS = field("aux_hidden_state_layer_ids", some_indices)
SPECULATOR_IGNORED = {*EAGLE.ignored, "max_anchors", "speculators_version"}
DRAFT_VOCABULARY = {"draft_vocab": field("draft_vocab_size", count, 32_000)}


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


def is_qwen3(value: Any) -> bool:
    """Parse whether a layer is Qwen3's, with normed queries and keys, instead of Llama's."""
    if value in ("llama", "qwen3"):
        return bool(value == "qwen3")
    raise ValueError("'llama' or 'qwen3'")
