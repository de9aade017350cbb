"""Heads of layers without a window that differ from those of the others, as in Gemma 4."""

from __future__ import annotations

from outpace.checkpoints.fields import (
    Field,
    Fields,
    few,
    field,
    flag,
    mapping,
    parse_value,
    shorten,
)
from outpace.models.uneven import GlobalHeads

PER_LAYER = "per_layer_config"
SAME_KEYS = field("attention_k_eq_v", flag, False)
GLOBAL_DIM, GLOBAL_KEYS = (
    field("global_head_dim", few, 512),
    field("num_global_key_value_heads", few, None),
)


def read_global_heads(published: Fields, ours: Fields) -> GlobalHeads:
    """Read the heads of layers without a window, in the published format or in transformers'."""
    same, wanted = SAME_KEYS.read(published, ours), published
    if published.get(PER_LAYER) is not None:
        layers = parse_value(PER_LAYER, published[PER_LAYER], mapping)
        full = {str(n) for n, sight in enumerate(ours["sights"]) if sight.window is None}
        own = list(layers.values())
        if {*layers} != full or any(each != own[0] for each in own):
            raise ValueError(
                f"{PER_LAYER} must have equal sizes for all full-attention layers and no others, "
                f"got {shorten(layers)}"
            )
        sizes = parse_value(PER_LAYER, own[0], mapping)
        renamed = {"head_dim": GLOBAL_DIM, "num_key_value_heads": GLOBAL_KEYS}
        if unknown := sizes.keys() - renamed.keys():
            raise ValueError(f"{PER_LAYER} has {min(unknown)!r}, which is not supported")
        wanted = {renamed[name].names[0]: value for name, value in sizes.items()}
    size = GLOBAL_DIM.read(wanted, ours)
    keys = (GLOBAL_KEYS.read(wanted, ours) if same else None) or ours["kv_heads"]
    if ours["heads"] % keys or size % 2:
        raise ValueError(
            f"full-attention layers must have heads of an even size and divide {ours['heads']} "
            f"heads, got {keys} key/value heads of {size}"
        )
    return GlobalHeads(
        kv_heads=keys, head_dim=size, query_factor=float(size**0.5), keys_as_values=same
    )


GLOBAL_HEADS = Field(
    (*SAME_KEYS.names, *GLOBAL_DIM.names, *GLOBAL_KEYS.names, PER_LAYER), read_global_heads
)
