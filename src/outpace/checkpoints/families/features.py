"""The fields of a DFlash draft: target layers, and fields that may be nested."""

from __future__ import annotations

from outpace.checkpoints.fields import (
    Fields,
    either,
    few,
    field,
    indices,
    inner,
    merge_fields,
    some_indices,
)

DFLASH_CONFIG, NESTED_FIELDS = (
    "dflash_config",
    ("block_size", "causal", "mask_token_id", "target_layer_ids"),
)
TARGET_LAYER_IDS = field("target_layer_ids", some_indices, None)
AUX_LAYER_IDS = field("eagle_aux_hidden_state_layer_ids", indices, None)
NUM_TARGET_LAYERS = field("num_target_layers", few)


def flatten_dflash(published: Fields) -> Fields:
    """Move the fields of `dflash_config` to the top level, where they may be as well."""
    own = inner(published, DFLASH_CONFIG).items()
    nested = {
        name if name in NESTED_FIELDS else f"{DFLASH_CONFIG}.{name}": value for name, value in own
    }
    return merge_fields(
        {name: value for name, value in published.items() if name != DFLASH_CONFIG}, nested
    )


def dflash_feature_layers(published: Fields, ours: Fields) -> tuple[int, ...]:
    """Return the target layers that are read, from 0; evenly spread if none are listed."""
    counted = tuple(
        layer - 1 for layer in AUX_LAYER_IDS.read(published, ours) or ()
    )  # 0: the embedding
    if listed := either(
        TARGET_LAYER_IDS.read(published, ours) or (),
        counted,
        (*TARGET_LAYER_IDS.names, *AUX_LAYER_IDS.names),
    ):
        return listed
    deep, layers = NUM_TARGET_LAYERS.read(published, ours), ours["layers"]
    if layers == 1:
        return (deep // 2,)
    return tuple(round(1 + layer * (deep - 4) / (layers - 1)) for layer in range(layers))
