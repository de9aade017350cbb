"""GLM-4.5, GLM-4.6 and GLM-4.7: mixtures of experts with a head for multi-token prediction."""

from __future__ import annotations

from outpace.checkpoints.families.family import (
    IGNORABLE,
    STRICT_DECODER,
    Family,
    MTPFormat,
    grouped_experts,
    with_experts,
)
from outpace.checkpoints.families.mtp import mtp_field, mtp_names
from outpace.checkpoints.families.rotary import partial_rope
from outpace.checkpoints.fields import few, field, flag, index
from outpace.decoding.target import Kind

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
        "experts": field("n_routed_experts num_local_experts", few),
        "experts_per_row": field("num_experts_per_tok", few),
        "norm_experts": field("norm_topk_prob", flag, True),
        **grouped_experts(field("n_shared_experts", index, 1), groups=1, scale=1.0),
        "dense_layers": field("first_k_dense_replace", index, 1),
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
