"""Fields and names of models with gated delta layers beside attention."""

from __future__ import annotations

from outpace.checkpoints.families.attention_windows import (
    FULL_ATTENTION,
    LAYER_TYPES,
    read_layer_types,
)
from outpace.checkpoints.families.family import BIASES, DECODER, STRICT_DECODER
from outpace.checkpoints.families.mtp import mtp_field
from outpace.checkpoints.families.partial import partial_rope
from outpace.checkpoints.fields import Field, Fields, count, few, field
from outpace.decoding.target import Kind
from outpace.models.delta_layers import DeltaLayers

LINEAR_ATTENTION = "linear_attention"
INTERVAL = field("full_attention_interval", few, 4)
DELTA_FIELDS: Fields = {
    "key_heads": field("linear_num_key_heads", few, 16),
    "value_heads": field("linear_num_value_heads", few, 32),
    "key_dim": field("linear_key_head_dim", few, 128),
    "value_dim": field("linear_value_head_dim", few, 128),
    "taps": field("linear_conv_kernel_dim", few, 4),
}
ROPE_FIELD = partial_rope(0.25)


def delta_field(*, grouped: bool) -> Field:
    """Return the field of the gated delta layers; `grouped` is as in `DeltaLayers`."""

    def read_value(published: Fields, ours: Fields) -> DeltaLayers:
        every = INTERVAL.read(published, ours)
        kinds = [
            FULL_ATTENTION if (layer + 1) % every == 0 else LINEAR_ATTENTION
            for layer in range(ours["layers"])
        ]
        if published.get(LAYER_TYPES) is not None:
            kinds = read_layer_types(published, ours, (LINEAR_ATTENTION, FULL_ATTENTION))
        if not {FULL_ATTENTION, LINEAR_ATTENTION} <= {*kinds}:
            raise ValueError(f"{LAYER_TYPES} must have {LINEAR_ATTENTION} and {FULL_ATTENTION}")
        layers = tuple(index for index, kind in enumerate(kinds) if kind == LINEAR_ATTENTION)
        sizes = {name: each.read(published, ours) for name, each in DELTA_FIELDS.items()}
        return DeltaLayers(layers=layers, grouped=grouped, **sizes)

    names = [name for each in (INTERVAL, *DELTA_FIELDS.values()) for name in each.names]
    return Field((LAYER_TYPES, *names), read_value)


HYBRID: Fields = {
    **{name: each for name, each in DECODER.items() if name not in ("sights", "mask_id")},
    **{name: STRICT_DECODER[name] for name in ("kv_heads", "max_length")},
    **BIASES,
    "kind": Kind.CAUSAL,
    "head_dim": field("head_dim", few, 256),
    "rope": ROPE_FIELD,
    "qk_norm": True,
    "norm_offset": True,
    "output_gate": True,
    # Without the field there is one head, as in Qwen3-Next; its tensors are checked on loading.
    "mtp": mtp_field("mtp_num_hidden_layers num_nextn_predict_layers", default=1),
}
MIXTURE: Fields = {
    "mlp": field("moe_intermediate_size", count, 512),
    "experts": field("num_experts", few),
    "experts_per_row": field("num_experts_per_tok", few),
    "shared_mlp": field("shared_expert_intermediate_size", count, 512),
    "shared_gate": True,
}
