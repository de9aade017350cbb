"""Qwen3-Next, Qwen3.5, Qwen3.6 and Qwen3.8 (text): gated delta layers beside gated attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outpace.checkpoints.families.attention_windows import (
    FULL_ATTENTION,
    LAYER_TYPES,
    read_layer_types,
)
from outpace.checkpoints.families.family import (
    BIASES,
    DECODER,
    HEAD_PREFIX,
    HUGGING_FACE_NAMES,
    IGNORABLE,
    IMAGES,
    STRICT_DECODER,
    Family,
    TensorNames,
    flatten_text,
    nest_names,
    replace_prefix,
    with_experts,
)
from outpace.checkpoints.families.gguf_format import GGUFFormat, Order, subtract_one, width_per_head
from outpace.checkpoints.families.rotary import ROTARY_FACTOR, partial_rope
from outpace.checkpoints.fields import (
    Field,
    Fields,
    count,
    few,
    field,
    flag,
    parse_value,
    shorten,
    words,
)
from outpace.decoding.target import Kind
from outpace.models.config import DeltaLayers, ModelConfig

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


def head_count(value: Any) -> int:
    """Parse a number of heads, which may be 0."""
    return 0 if type(value) is int and value == 0 else few(value)


HYBRID: Fields = {
    **{name: each for name, each in DECODER.items() if name not in ("windows", "mask_id")},
    **{name: STRICT_DECODER[name] for name in ("kv_heads", "max_length")},
    **BIASES,
    "kind": Kind.CAUSAL,
    "head_dim": field("head_dim", few, 256),
    "rope": ROPE_FIELD,
    "qk_norm": True,
    "norm_offset": True,
    "output_gate": True,
    # Without the field there is one head, as in Qwen3-Next; its tensors are checked on loading.
    "mtp_heads": field("mtp_num_hidden_layers num_nextn_predict_layers", head_count, 1),
}
MIXTURE: Fields = {
    "mlp": field("moe_intermediate_size", count, 512),
    "experts": field("num_experts", few),
    "experts_per_row": field("num_experts_per_tok", few),
    "shared_mlp": field("shared_expert_intermediate_size", count, 512),
    "shared_gate": True,
}


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
    "blocks.{}.attention.qkvz.weight": (f"{DELTA}in_proj_qkv.weight", f"{DELTA}in_proj_z.weight"),
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
    experts = f"{model}.layers.{{}}.mlp.experts"
    return {
        "blocks.{}.mlp.experts.{}.gate_up.weight": f"{experts}.gate_up_proj[{{}}]",
        "blocks.{}.mlp.experts.{}.down.weight": f"{experts}.down_proj[{{}}]",
    }


HEAD_NAMES: TensorNames = {
    "norm.weight": f"{HEAD_PREFIX}norm.weight",
    "fusion.weight": f"{HEAD_PREFIX}fc.weight",
    "embedding_norm.weight": f"{HEAD_PREFIX}pre_fc_norm_embedding.weight",
    "state_norm.weight": f"{HEAD_PREFIX}pre_fc_norm_hidden.weight",
    "embedding.weight": f"{HEAD_PREFIX}embed_tokens.weight",
}


def with_head(family: Family, names: TensorNames) -> Family:
    """Return a family with the format of its head, whose layer has these `names`.

    Its input is the embedding, then the state after the final norm, as in vLLM
    (https://github.com/vllm-project/vllm, `qwen3_next_mtp.py`, `qwen3_5_mtp.py`), SGLang
    (https://github.com/sgl-project/sglang) and llama.cpp (https://github.com/ggml-org/llama.cpp).
    The head's own state after its norm is its next input.
    """
    layer = replace_prefix(names, "model.", HEAD_PREFIX).items()
    blocks = {ours: theirs for ours, theirs in layer if ours.startswith("blocks.")}
    own = {**blocks, **HEAD_NAMES}
    return replace(family, mtp=replace(family, names=own, fused=fused_experts("mtp"), unread=()))


DELTA_MODULE = "linear_attn."


def delta_layers(config: ModelConfig) -> DeltaLayers:
    assert config.delta is not None
    return config.delta


def spread_heads(config: ModelConfig, count: int) -> Tensor:
    """Return the places of all value heads; `count` is the size of them together."""
    delta = delta_layers(config)
    places = torch.arange(count).view(-1, delta.key_heads, count // delta.value_heads)
    return places.transpose(0, 1).flatten()


def spread_values(config: ModelConfig, count: int) -> Tensor:
    """Return the places of queries, keys and values, of which only values are spread."""
    before = 2 * delta_layers(config).key_size
    return torch.cat((torch.arange(before), before + spread_heads(config, count - before)))


def group_parts(config: ModelConfig, count: int) -> Tensor:
    """Return the places of queries, keys, values and gates that are published by key head."""
    delta = delta_layers(config)
    parts = torch.arange(count).split([delta.key_size] * 2 + [delta.value_size] * 2)
    return torch.cat([part.view(delta.key_heads, -1) for part in parts], 1).flatten()


def part_rows(config: ModelConfig) -> tuple[int, ...]:
    """Return the rows of queries, keys and values together, and those of gates."""
    return delta_layers(config).mixed_size, delta_layers(config).value_size


SPREAD_ROWS: Mapping[str, Order] = {
    **{f"{DELTA_MODULE}{name}.weight": spread_values for name in ("in_proj_qkv", "conv1d")},
    **{f"{DELTA_MODULE}in_proj_{part}.weight": spread_heads for part in "zba"},
    **{f"{DELTA_MODULE}{name}": spread_heads for name in ("A_log", "dt_bias")},
}
SPREAD_COLUMNS: Mapping[str, Order] = {f"{DELTA_MODULE}out_proj.weight": spread_heads}


RECURRENT_LAYERS, ROTATED_SIZE = "attention.recurrent_layers", "rope.dimension_count"
VALUE_SIZE, VALUE_HEADS = "ssm.inner_size", "linear_num_value_heads"
ROPE_SECTIONS = "rope.dimension_sections"
NORMS = ("layernorm.weight", "_norm.weight", "model.norm.weight")
"""Ends of the names of norms whose code adds 1; that of the mixer is not one of them."""


def derive_fields(metadata: dict[str, Any], fields: Fields) -> Fields:
    """Remove metadata of gated delta layers, and return the published fields that follow."""
    metadata.pop(ROPE_SECTIONS, None)  # matters only for images
    size = parse_value("head_dim", fields.get("head_dim") or width_per_head(fields), few)
    rotated = parse_value(ROTATED_SIZE, metadata.pop(ROTATED_SIZE, size), count)
    values = parse_value(VALUE_SIZE, metadata.pop(VALUE_SIZE, None), count)
    heads = parse_value(VALUE_HEADS, fields.get(VALUE_HEADS), few)
    if values % heads:
        raise ValueError(f"{VALUE_SIZE} must be a multiple of {heads} heads, got {values}")
    derived = {"linear_value_head_dim": values // heads, ROTARY_FACTOR: rotated / size}
    if (recurrent := metadata.pop(RECURRENT_LAYERS, None)) is None:
        return derived
    if not isinstance(recurrent, list) or any(each not in (0, 1) for each in recurrent):
        raise ValueError(f"{RECURRENT_LAYERS} must be a list of booleans, got {shorten(recurrent)}")
    kinds = [(FULL_ATTENTION, LINEAR_ATTENTION)[each] for each in recurrent]
    layers = parse_value("num_hidden_layers", fields.get("num_hidden_layers"), few)
    return {**derived, LAYER_TYPES: kinds[:layers]}


def hybrid_format(architecture: str, **others: Any) -> GGUFFormat:
    tensors = {
        f"{DELTA_MODULE}dt_bias": (f"{DELTA_MODULE}dt_proj.bias",),
        **others.pop("tensors", {}),
    }
    return GGUFFormat(
        architecture=architecture,
        derived=derive_fields,
        values={
            f"{DELTA_MODULE}A_log": lambda decay: (-decay).log(),  # the file has negative decays
            **dict.fromkeys(NORMS, subtract_one),
        },
        tensors=tensors,
        **others,
    )


QWEN3_5_GGUF = hybrid_format("qwen35", rows=SPREAD_ROWS, columns=SPREAD_COLUMNS)
QWEN3_5_MOE_GGUF = hybrid_format("qwen35moe", rows=SPREAD_ROWS, columns=SPREAD_COLUMNS)
QKVZ = f"{DELTA_MODULE}in_proj_qkvz.weight"
QWEN3_NEXT_GGUF = hybrid_format(
    "qwen3next",
    tensors={QKVZ: (f"{DELTA_MODULE}in_proj_qkv.weight", f"{DELTA_MODULE}in_proj_z.weight")},
    rows={QKVZ: group_parts},
    sizes={QKVZ: part_rows},
)


QWEN3_NEXT = Family(
    name="qwen3_next",
    about="Qwen3-Next: gated delta layers beside gated attention, mixtures of experts",
    architectures=("Qwen3NextForCausalLM",),
    checkpoints=("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Coder-Next"),
    fields={
        **HYBRID,
        **MIXTURE,
        "norm_experts": field("norm_topk_prob", flag, True),
        "delta": delta_field(grouped=True),
    },
    fixed={"hidden_act": "silu", "decoder_sparse_step": 1},
    ignored=IGNORABLE | words("intermediate_size router_aux_loss_coef output_router_logits"),
    unread=(HEAD_PREFIX,),
    names={**MIXTURE_NAMES, **GROUPED_NAMES},
    gguf=QWEN3_NEXT_GGUF,
)
QWEN3_NEXT = with_head(QWEN3_NEXT, MIXTURE_NAMES)


IGNORED = IGNORABLE | words("mamba_ssm_dtype mtp_use_dedicated_embeddings")
UNREAD = ("model.visual.", HEAD_PREFIX)
"""Prefixes of the tensors for images, and of those of the head."""

QWEN3_5_TEXT = Family(
    name="qwen3_5_text",
    about="Qwen3.5 without images: gated delta layers beside gated attention",
    architectures=("Qwen3_5ForCausalLM",),
    checkpoints=("codecho/Qwen3.5-0.8B-text-only",),
    fields={**HYBRID, "delta": delta_field(grouped=False)},
    fixed={"hidden_act": "silu", "attn_output_gate": True, "output_gate_type": "swish"},
    ignored=IGNORED,
    unread=UNREAD,
    flat=flatten_text,
    names={**HUGGING_FACE_NAMES, **SPLIT_NAMES},
    gguf=QWEN3_5_GGUF,
)
QWEN3_5_TEXT = with_head(QWEN3_5_TEXT, HUGGING_FACE_NAMES)

QWEN3_5 = replace(
    QWEN3_5_TEXT,
    name="qwen3_5",
    about="Qwen3.5, Qwen3.6 and Qwen3.8 (dense), whose text is read",
    architectures=("Qwen3_5ForConditionalGeneration",),
    checkpoints=tuple(f"Qwen/Qwen3.{name}" for name in ("5-4B", "5-9B", "5-27B", "6-27B", "8-27B")),
    ignored=IGNORED | IMAGES,
    names=nest_names(QWEN3_5_TEXT.names),
    gguf=None,
)

MOE_IGNORED = words("intermediate_size router_aux_loss_coef output_router_logits")

QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    name="qwen3_5_moe_text",
    about="Qwen3.5 without images, mixtures of experts",
    architectures=("Qwen3_5MoeForCausalLM",),
    checkpoints=("codecho/Qwen3.5-35B-A3B-text-only",),
    fields={**QWEN3_5_TEXT.fields, **MIXTURE, "norm_experts": True},
    ignored=IGNORED | MOE_IGNORED,
    names={**MIXTURE_NAMES, **SPLIT_NAMES},
    fused=fused_experts("model"),
    gguf=QWEN3_5_MOE_GGUF,
)
QWEN3_5_MOE_TEXT = with_head(QWEN3_5_MOE_TEXT, MIXTURE_NAMES)

QWEN3_5_MOE = replace(
    QWEN3_5_MOE_TEXT,
    name="qwen3_5_moe",
    about="Qwen3.5 and Qwen3.6, mixtures of experts, whose text is read",
    architectures=("Qwen3_5MoeForConditionalGeneration",),
    checkpoints=(
        "Qwen/Qwen3.5-35B-A3B",
        "Qwen/Qwen3.5-122B-A10B",
        "Qwen/Qwen3.6-35B-A3B",
        "InternScience/Agents-A1",
    ),
    ignored=IGNORED | IMAGES | MOE_IGNORED,
    names=nest_names(QWEN3_5_MOE_TEXT.names),
    fused=fused_experts("model.language_model"),
    gguf=None,
)
