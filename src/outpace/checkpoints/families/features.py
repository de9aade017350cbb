"""The fields of a DFlash draft: target layers, and fields that may be nested."""

from __future__ import annotations

from outpace.checkpoints.fields import Given, beside, either, few, field, indices, inner, some

OWN, NESTED = "dflash_config", ("block_size", "causal", "mask_token_id", "target_layer_ids")
LISTED = field("target_layer_ids", some, None)
COUNTED = field("eagle_aux_hidden_state_layer_ids", indices, None)
TARGET = field("num_target_layers", few)


def flat(published: Given) -> Given:
    """Move the fields of `dflash_config` to the top level, where they may be as well."""
    own = inner(published, OWN).items()
    nested = {name if name in NESTED else f"{OWN}.{name}": value for name, value in own}
    return beside({name: value for name, value in published.items() if name != OWN}, nested)


def feature_layers(published: Given, ours: Given) -> tuple[int, ...]:
    """Return the target layers that are read, from 0; evenly spread if none are listed."""
    counted = tuple(layer - 1 for layer in COUNTED.value(published, ours) or ())  # 0: the embedding
    if listed := either(
        LISTED.value(published, ours) or (), counted, (*LISTED.names, *COUNTED.names)
    ):
        return listed
    deep, layers = TARGET.value(published, ours), ours["layers"]
    if layers == 1:
        return (deep // 2,)
    return tuple(round(1 + layer * (deep - 4) / (layers - 1)) for layer in range(layers))
