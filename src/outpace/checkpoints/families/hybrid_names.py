"""Tensor names of models with gated delta layers beside attention."""

from __future__ import annotations

from outpace.checkpoints.families.family import (
    MTPFormat,
    TensorNames,
    replace_prefix,
    with_experts,
)
from outpace.checkpoints.families.mtp import mtp_names

DELTA, MLP = "model.layers.{}.linear_attn.", "model.layers.{}.mlp."
DELTA_NAMES: TensorNames = {
    "blocks.{}.attention.convolution": f"{DELTA}conv1d.weight",
    "blocks.{}.attention.log_decay": f"{DELTA}A_log",
    "blocks.{}.attention.step_bias": f"{DELTA}dt_bias",
    "blocks.{}.attention.norm.weight": f"{DELTA}norm.weight",
    "blocks.{}.attention.merge.weight": f"{DELTA}out_proj.weight",
}
GROUPED_NAMES: TensorNames = {
    **DELTA_NAMES,
    "blocks.{}.attention.qkvz.weight": f"{DELTA}in_proj_qkvz.weight",
    "blocks.{}.attention.gates.weight": f"{DELTA}in_proj_ba.weight",
}
SPLIT_NAMES: TensorNames = {
    **DELTA_NAMES,
    "blocks.{}.attention.qkvz.weight": (
        f"{DELTA}in_proj_qkv.weight",
        f"{DELTA}in_proj_z.weight",
    ),
    "blocks.{}.attention.gates.weight": (f"{DELTA}in_proj_b.weight", f"{DELTA}in_proj_a.weight"),
}
MIXTURE_NAMES: TensorNames = {
    **with_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    "blocks.{}.mlp.shared.gate_up.weight": (
        f"{MLP}shared_expert.gate_proj.weight",
        f"{MLP}shared_expert.up_proj.weight",
    ),
    "blocks.{}.mlp.shared.down.weight": f"{MLP}shared_expert.down_proj.weight",
    "blocks.{}.mlp.shared_gate": f"{MLP}shared_expert_gate.weight",
}


def fused_experts(model: str) -> dict[str, str]:
    """Return the names of experts that are published as one tensor per layer of `model`."""
    experts = f"{model}.layers.{{}}.mlp.experts"
    return {
        "blocks.{}.mlp.experts.{}.gate_up.weight": f"{experts}.gate_up_proj[{{}}]",
        "blocks.{}.mlp.experts.{}.down.weight": f"{experts}.down_proj[{{}}]",
    }


def hybrid_mtp(names: TensorNames) -> MTPFormat:
    """Return the format of the head of a model with these `names` of attention and MLP."""
    return MTPFormat(
        prefix="mtp.",
        names=mtp_names(
            replace_prefix(names, "model.", "mtp."),
            "mtp.",
            norm="norm",
            fusion="fc",
            embedding_norm="pre_fc_norm_embedding",
            state_norm="pre_fc_norm_hidden",
        ),
        fused=fused_experts("mtp"),
    )
