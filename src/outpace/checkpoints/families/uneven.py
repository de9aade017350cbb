"""Fields of layers that share keys, or receive separate inputs, as in Gemma 4."""

from __future__ import annotations

from outpace.checkpoints.families.attention_windows import LAYER_TYPES
from outpace.checkpoints.fields import Field, Fields, field, flag, index, shorten
from outpace.decoding.target import Kind
from outpace.models.uneven import SharedKeys

BIDIRECTIONAL = "use_bidirectional_attention"
SHARED_LAYERS = field("num_kv_shared_layers", index, 0)
DOUBLE_MLP = field("use_double_wide_mlp", flag, False)
INPUT_SIZE = field("hidden_size_per_layer_input", index, 256)
INPUT_VOCABULARY = field("vocab_size_per_layer_input", index, 262_144)


def read_shared_keys(published: Fields, ours: Fields) -> SharedKeys | None:
    """Read how many of the last layers attend to the keys of earlier ones."""
    count, sights = SHARED_LAYERS.read(published, ours), ours["sights"]
    wide = DOUBLE_MLP.read(published, ours)
    if not count:
        return None
    if count >= ours["layers"] or {*sights[-count:]} - {*sights[:-count]}:
        raise ValueError(
            f"num_kv_shared_layers is {count}, but these layers need an earlier one of each type "
            f"in {LAYER_TYPES} that is not shared"
        )
    if ours["experts_beside"]:
        raise ValueError(f"num_kv_shared_layers must be 0 with enable_moe_block, got {count}")
    return SharedKeys(count=count, mlp=ours["mlp"] * (2 if wide else 1))


def read_layer_input(published: Fields, ours: Fields) -> int:
    """Read the size of embeddings per layer, whose vocabulary must be that of the model."""
    size: int = INPUT_SIZE.read(published, ours)
    if size and (found := INPUT_VOCABULARY.read(published, ours)) != ours["vocab"]:
        raise ValueError(f"vocab_size_per_layer_input must be {ours['vocab']}, got {found}")
    return size


def read_kind(published: Fields, ours: Fields) -> Kind:
    """Return that text is causal; raise `ValueError` where it is not."""
    if published.get(BIDIRECTIONAL) not in (None, False, "vision"):
        value = shorten(published[BIDIRECTIONAL])
        raise ValueError(f"{BIDIRECTIONAL} must be 'vision' or null, got {value}")
    return Kind.CAUSAL


CAUSAL_TEXT = Field((BIDIRECTIONAL,), read_kind)
SHARED_KEYS = Field((*SHARED_LAYERS.names, *DOUBLE_MLP.names), read_shared_keys)
LAYER_INPUT = Field((*INPUT_SIZE.names, *INPUT_VOCABULARY.names), read_layer_input)
