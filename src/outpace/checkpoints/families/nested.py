"""The nested fields of drafts written by the library speculators."""

from __future__ import annotations

from typing import Any

from outpace.checkpoints.families.eagle import EAGLE
from outpace.checkpoints.fields import Given, beside, checked, count, field, flag, inner, some

LAYER, KIND, SETTINGS = "transformer_layer_config", "speculators_model_type", "speculators_config"
ALGORITHM, BOTH_WAYS = f"{SETTINGS}.algorithm", "sliding_window_non_causal"
COUNTED = field("aux_hidden_state_layer_ids", some)
IGNORED = {*EAGLE.ignored, "max_anchors", "speculators_version"}
VOCABULARY = {"draft_vocab": field("draft_vocab_size", count, 32_000)}


def flat(published: Given) -> Given:
    """Move the fields of the layers to the top level; decoding settings are not read."""
    outer = {name: value for name, value in published.items() if name not in (LAYER, SETTINGS)}
    layer, algorithm = inner(published, LAYER), inner(published, SETTINGS).get("algorithm")
    own = {name: value for name, value in layer.items() if name not in IGNORED & outer.keys()}
    return {**beside(own, outer), "model_type": layer.get("model_type"), ALGORITHM: algorithm}


def with_sights(published: Given) -> Given:
    """Flatten, and translate attention within a block to the field of a DFlash draft."""
    flattened = dict(flat(published))
    value = flattened.pop(BOTH_WAYS, None)
    bidirectional = value is not None and checked(BOTH_WAYS, value, flag)
    return {**flattened, "is_causal": False} if bidirectional else flattened


def feature_layers(published: Given, ours: Given) -> tuple[int, ...]:
    """Return the target layers that are read, from 0; in the published field 0 is the embedding."""
    return tuple(layer - 1 for layer in COUNTED.value(published, ours))


def is_qwen3(value: Any) -> bool:
    """Parse whether a layer is Qwen3's, with normed queries and keys, instead of Llama's."""
    if value in ("llama", "qwen3"):
        return bool(value == "qwen3")
    raise ValueError("'llama' or 'qwen3'")
