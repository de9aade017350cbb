"""Gemma 3 (text): sliding windows with a separate rotary base, scaled embeddings."""

from __future__ import annotations

from outpace.checkpoints.families.attention_windows import alternating_windows
from outpace.checkpoints.families.family import (
    BIASES,
    IGNORABLE,
    POST_NORM_NAMES,
    STRICT_DECODER,
    Family,
)
from outpace.checkpoints.families.gguf_format import GGUFFormat, subtract_one, width_per_head
from outpace.checkpoints.families.rotary import FULL_ROPE, sliding_rope
from outpace.checkpoints.fields import Field, Fields, few, field, flag, number

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
        values={"norm.weight": subtract_one},
    ),
)
