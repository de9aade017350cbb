"""Names of Gemma 4's tensors, and what of a checkpoint is only for images and sound."""

from __future__ import annotations

from outpace.checkpoints.families.family import POST_NORM_NAMES, TensorNames
from outpace.checkpoints.fields import words

MODALITIES = words(
    """
    audio_config audio_token_id boa_token_id boi_token_id eoa_token_id eoa_token_index eoi_token_id
    image_token_id video_token_id vision_config vision_soft_tokens_per_image
    """
)
"""Fields that matter only for images and sound."""

UNREAD = tuple(
    f"model.{part}."
    for part in ("vision_tower", "vision_embedder", "audio_tower", "embed_vision", "embed_audio")
)
"""Prefixes of the tensors for images and sound."""

LAYER = "model.layers.{}"
GEMMA4_NAMES: TensorNames = {
    **POST_NORM_NAMES,
    "blocks.{}.mlp_norm.weight": f"{LAYER}.pre_feedforward_layernorm.weight",
    "blocks.{}.scale": f"{LAYER}.layer_scalar",
    "blocks.{}.layer_gate.gate.weight": f"{LAYER}.per_layer_input_gate.weight",
    "blocks.{}.layer_gate.projection.weight": f"{LAYER}.per_layer_projection.weight",
    "blocks.{}.layer_gate.norm.weight": f"{LAYER}.post_per_layer_input_norm.weight",
    "blocks.{}.mlp.dense_norm.weight": f"{LAYER}.pre_feedforward_layernorm.weight",
    "blocks.{}.mlp.dense.gate_up.weight": POST_NORM_NAMES["blocks.{}.mlp.gate_up.weight"],
    "blocks.{}.mlp.dense.down.weight": POST_NORM_NAMES["blocks.{}.mlp.down.weight"],
    "blocks.{}.mlp.dense_after.weight": f"{LAYER}.post_feedforward_layernorm_1.weight",
    "blocks.{}.mlp.experts_norm.weight": f"{LAYER}.pre_feedforward_layernorm_2.weight",
    "blocks.{}.mlp.routed.router.weight": f"{LAYER}.router.proj.weight",
    "blocks.{}.mlp.routed.router.scale": f"{LAYER}.router.scale",
    "blocks.{}.mlp.routed.expert_scale": f"{LAYER}.router.per_expert_scale",
    "blocks.{}.mlp.routed.experts.{}.gate_up.weight": f"{LAYER}.experts.gate_up_proj[{{}}]",
    "blocks.{}.mlp.routed.experts.{}.down.weight": f"{LAYER}.experts.down_proj[{{}}]",
    "blocks.{}.mlp.experts_after.weight": f"{LAYER}.post_feedforward_layernorm_2.weight",
    "embeddings.table.weight": "model.embed_tokens_per_layer.weight",
    "embeddings.projection.weight": "model.per_layer_model_projection.weight",
    "embeddings.norm.weight": "model.per_layer_projection_norm.weight",
}
