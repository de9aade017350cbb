"""Gemma 3 and Gemma 4 (text): sliding windows with a separate rotary base, scaled embeddings."""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.families.attention_windows import LAYER_TYPES, alternating_windows
from outpace.checkpoints.families.family import (
    BIASES,
    IGNORABLE,
    POST_NORM_NAMES,
    STRICT_DECODER,
    Family,
    TensorNames,
    flatten_text,
    nest_names,
)
from outpace.checkpoints.families.gguf_format import GGUFFormat, subtract_one, width_per_head
from outpace.checkpoints.families.rotary import FULL_ROPE, SPREAD_ROPE, sliding_rope
from outpace.checkpoints.fields import (
    Field,
    Fields,
    count,
    few,
    field,
    flag,
    index,
    mapping,
    number,
    parse_value,
    shorten,
    words,
)
from outpace.decoding.target import Kind
from outpace.models.config import GlobalHeads, SharedKeys

LAYERS_27B = 62
"""Layers of the largest model, by which llama.cpp recognises it."""

QUERY_SCALAR = field("query_pre_attn_scalar", number)


def query_factor(published: Fields, ours: Fields) -> float:
    """Return the factor for queries: the scale's divisor may differ from the head size."""
    return float((ours["head_dim"] / QUERY_SCALAR.read(published, ours)) ** 0.5)


def default_query_scalar(fields: Fields) -> int | None:
    """Return the divisor that llama.cpp uses: the head size, except in the model of 27B."""
    if fields.get("num_hidden_layers") == LAYERS_27B:
        return width_per_head(fields)
    size: int | None = fields.get("head_dim")
    return size


GEMMA3 = Family(
    name="gemma3",
    about="Gemma 3, text: windows in most layers, norms on both sides",
    architectures=("Gemma3ForCausalLM",),
    checkpoints=("google/gemma-3-270m-it", "google/gemma-3-1b-it", "google/gemma-3-1b-pt"),
    fields={
        **STRICT_DECODER,
        **BIASES,
        "head_dim": field("head_dim", few),
        "tied": field("tie_word_embeddings", flag, True),
        "windows": alternating_windows(6),
        "rope": FULL_ROPE,
        "local_rope": sliding_rope("rope_local_base_freq"),
        "query_factor": Field(QUERY_SCALAR.names, query_factor),
        "qk_norm": True,
        "norms": "around",
        "norm_offset": True,
        "activation": "gelu_tanh",
        "embedding_scale": lambda ours: ours["dim"] ** 0.5,
    },
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    ignored=IGNORABLE | {"cache_implementation"},
    names={
        **POST_NORM_NAMES,
        "blocks.{}.mlp_norm.weight": "model.layers.{}.pre_feedforward_layernorm.weight",
    },
    gguf=GGUFFormat(
        architecture="gemma3",
        implied={
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": default_query_scalar,
            "rope_local_base_freq": 10_000.0,
        },
        required_tokenizer=("tokenizer.ggml.add_space_prefix",),
        values={"norm.weight": subtract_one},
    ),
)


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
        full = {str(n) for n, each in enumerate(ours["windows"]) if each.window is None}
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


BIDIRECTIONAL = "use_bidirectional_attention"
SHARED_LAYERS = field("num_kv_shared_layers", index, 0)
DOUBLE_MLP = field("use_double_wide_mlp", flag, False)
INPUT_SIZE = field("hidden_size_per_layer_input", index, 256)
INPUT_VOCABULARY = field("vocab_size_per_layer_input", index, 262_144)


def read_shared_keys(published: Fields, ours: Fields) -> SharedKeys | None:
    count, windows = SHARED_LAYERS.read(published, ours), ours["windows"]
    wide = DOUBLE_MLP.read(published, ours)
    if not count:
        return None
    if count >= ours["layers"] or {*windows[-count:]} - {*windows[:-count]}:
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


MIXES = field("enable_moe_block", flag, False)
NAMES = "num_experts", "top_k_experts", "moe_intermediate_size"
SIZES = (field(NAMES[0], few), field(NAMES[1], few), field(NAMES[2], count))
WIDTH = field("intermediate_size", count)


def mixture_field(size: Field) -> Field:
    """Return the field of a size of the mixture: 0 in a model without one."""

    def read_value(published: Fields, ours: Fields) -> int:
        if ours["experts_beside"]:
            return int(size.read(published, ours))
        (name,) = size.names
        if size is not WIDTH and published.get(name):
            raise ValueError(f"{name} is {shorten(published[name])} without enable_moe_block")
        return 0

    return Field(size.names, read_value)


def read_width(published: Fields, ours: Fields) -> int:
    width = SIZES[2] if ours["experts_beside"] else WIDTH
    return int(width.read(published, ours))


BESIDE_EXPERTS: Fields = {
    "experts_beside": MIXES,
    "experts": mixture_field(SIZES[0]),
    "experts_per_row": mixture_field(SIZES[1]),
    "norm_experts": lambda ours: ours["experts_beside"],
    "mlp": Field((*WIDTH.names, *SIZES[2].names), read_width),
    "dense_mlp": mixture_field(WIDTH),
}


LATER = "mask_id", "rope", "mlp"
"""Fields that are not read, or read after others."""

GEMMA4_TEXT = Family(
    name="gemma4_text",
    about="Gemma 4 without images and sound",
    architectures=("Gemma4ForCausalLM",),
    checkpoints=("principled-intelligence/gemma-4-E2B-it-text-only",),
    fields={
        **{name: each for name, each in STRICT_DECODER.items() if name not in LATER},
        **BIASES,
        "kind": CAUSAL_TEXT,
        "head_dim": field("head_dim", few),
        "tied": field("tie_word_embeddings", flag, True),
        "windows": alternating_windows(6),
        "global_heads": GLOBAL_HEADS,
        **BESIDE_EXPERTS,
        "shared_keys": SHARED_KEYS,
        "layer_input": LAYER_INPUT,
        "layer_scale": True,
        "rope": SPREAD_ROPE,
        "local_rope": sliding_rope("rope_local_base_freq"),
        "query_factor": lambda ours: ours["head_dim"] ** 0.5,
        "qk_norm": True,
        "value_norm": True,
        "norms": "around",
        "activation": "gelu_tanh",
        "embedding_scale": lambda ours: ours["dim"] ** 0.5,
        "logit_cap": field("final_logit_softcapping", number, 0.0),
    },
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    names=GEMMA4_NAMES,
)
GEMMA4 = replace(
    GEMMA4_TEXT,
    name="gemma4",
    about="Gemma 4, whose text is read",
    architectures=("Gemma4ForConditionalGeneration",),
    checkpoints=(
        "google/gemma-4-31B-it",
        "google/gemma-4-26B-A4B-it",
        "google/gemma-4-E4B-it",
        "google/gemma-4-E2B-it",
    ),
    ignored=IGNORABLE | MODALITIES,
    unread=UNREAD,
    flat=flatten_text,
    names=nest_names(GEMMA4_TEXT.names),
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="gemma4_unified",
    about="Gemma 4 (12B), whose text is read",
    architectures=("Gemma4UnifiedForConditionalGeneration",),
    checkpoints=("google/gemma-4-12B-it", "google/gemma-4-12B"),
    fields={**GEMMA4.fields, "layer_input": 0},
    fixed={**GEMMA4.fixed, "hidden_size_per_layer_input": 0},
    ignored=IGNORABLE | MODALITIES | {"vocab_size_per_layer_input"},
)
