"""GLM-4.5, GLM-4.6 and GLM-4.7: mixtures of experts with a head for multi-token prediction."""

from __future__ import annotations

from outpace.checkpoints.families.family import (
    IGNORABLE,
    STRICT_DECODER,
    Family,
    MTPFormat,
    with_experts,
)
from outpace.checkpoints.families.mtp import mtp_field, mtp_names
from outpace.checkpoints.families.partial import partial_rope
from outpace.checkpoints.fields import Field, Fields, count, few, field, flag, group, index, number
from outpace.decoding.target import Kind
from outpace.models.config import ExpertGroups

LAYER = "model.layers.{}."
SHARED = f"{LAYER}mlp.shared_experts."
GATED = "gate_proj", "up_proj", "down_proj"
GLM4_NAMES = {
    **with_experts("mlp", *GATED),
    "blocks.{}.mlp.gate_up.weight": tuple(f"{LAYER}mlp.{part}.weight" for part in GATED[:2]),
    "blocks.{}.mlp.down.weight": f"{LAYER}mlp.down_proj.weight",
    "blocks.{}.mlp.preference": f"{LAYER}mlp.gate.e_score_correction_bias",
    "blocks.{}.mlp.shared.gate_up.weight": tuple(f"{SHARED}{part}.weight" for part in GATED[:2]),
    "blocks.{}.mlp.shared.down.weight": f"{SHARED}down_proj.weight",
}
EXPERT_GROUPS: Fields = {
    "count": field("n_group", few, 1),
    "chosen": field("topk_group", few, 1),
    "scale": field("routed_scaling_factor", number, 1.0),
}
SHARED_EXPERTS = field("n_shared_experts", index, 1)


def shared_width(published: Fields, ours: Fields) -> int:
    """Return the width of the shared experts, which form one MLP."""
    return int(SHARED_EXPERTS.read(published, ours) * ours["mlp"])


GLM4_MOE = Family(
    name="glm4_moe",
    about="GLM-4.5, GLM-4.6 and GLM-4.7 (mixtures of experts)",
    architectures=("Glm4MoeForCausalLM",),
    checkpoints=("zai-org/GLM-4.5", "zai-org/GLM-4.5-Air", "zai-org/GLM-4.6", "zai-org/GLM-4.7"),
    fields={
        **{name: each for name, each in STRICT_DECODER.items() if name != "mask_id"},
        "rope": partial_rope(0.5),
        "kind": Kind.CAUSAL,
        "qkv_bias": field("attention_bias", flag, False),
        "qk_norm": field("use_qk_norm", flag, False),
        "mlp": field("moe_intermediate_size", count),
        "experts": field("n_routed_experts num_local_experts", few),
        "experts_per_row": field("num_experts_per_tok", few),
        "norm_experts": field("norm_topk_prob", flag, True),
        "expert_groups": group(ExpertGroups, EXPERT_GROUPS),
        "shared_mlp": Field(SHARED_EXPERTS.names, shared_width),
        "dense_layers": field("first_k_dense_replace", index, 1),
        "dense_mlp": field("intermediate_size", count),
        "precise_router": True,
        "mtp": mtp_field("num_nextn_predict_layers num_mtp_layers", 1, is_last_layer=True),
    },
    fixed={"hidden_act": "silu"},
    ignored=IGNORABLE | {"output_router_logits"},
    names=GLM4_NAMES,
    mtp=MTPFormat(
        prefix=LAYER,
        names=mtp_names(
            GLM4_NAMES,
            LAYER,
            norm="shared_head.norm",
            fusion="eh_proj",
            embedding_norm="enorm",
            state_norm="hnorm",
        ),
        copies=(f"{LAYER}shared_head.head.weight",),
    ),
)
