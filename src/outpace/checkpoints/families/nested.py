"""Fields of a draft that the library speculators wrote, beside each other."""

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
    """The fields of the layers beside the others; what is said of a decode is not read."""
    outer = {name: value for name, value in published.items() if name not in (LAYER, SETTINGS)}
    layer, algorithm = inner(published, LAYER), inner(published, SETTINGS).get("algorithm")
    own = {name: value for name, value in layer.items() if name not in IGNORED & outer.keys()}
    return {**beside(own, outer), "model_type": layer.get("model_type"), ALGORITHM: algorithm}


def with_sights(published: Given) -> Given:
    """The same, with what rows see of their own block as a plain draft says it."""
    given = dict(flat(published))
    value = given.pop(BOTH_WAYS, None)
    unbound = value is not None and checked(BOTH_WAYS, value, flag)
    return {**given, "is_causal": False} if unbound else given


def feature_layers(given: Given, ours: Given) -> tuple[int, ...]:
    """Layers of the target, counted from 0; published ones count the embedding as layer 0."""
    return tuple(layer - 1 for layer in COUNTED.value(given, ours))


def is_qwen3(value: Any) -> bool:
    """Whether a layer is Qwen3's, which norms queries and keys, and not Llama's."""
    if value in ("llama", "qwen3"):
        return bool(value == "qwen3")
    raise ValueError("'llama' or 'qwen3'")
