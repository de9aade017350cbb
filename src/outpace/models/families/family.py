"""A family translates one published format: the fields of its config, the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outpace.models.config import ModelConfig

Names = Mapping[str, str | tuple[str, ...]]
"""Our parameter names to published ones; `{}` is the layer, a tuple is stacked by rows."""

HUGGING_FACE_NAMES: Names = {
    "embedding.weight": "model.embed_tokens.weight",
    "blocks.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blocks.{}.attention.qkv.weight": (
        "model.layers.{}.self_attn.q_proj.weight",
        "model.layers.{}.self_attn.k_proj.weight",
        "model.layers.{}.self_attn.v_proj.weight",
    ),
    "blocks.{}.attention.qkv.bias": (
        "model.layers.{}.self_attn.q_proj.bias",
        "model.layers.{}.self_attn.k_proj.bias",
        "model.layers.{}.self_attn.v_proj.bias",
    ),
    "blocks.{}.attention.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "blocks.{}.attention.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "blocks.{}.attention.out.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blocks.{}.attention.out.bias": "model.layers.{}.self_attn.o_proj.bias",
    "blocks.{}.mlp_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blocks.{}.mlp.gate_up.weight": (
        "model.layers.{}.mlp.gate_proj.weight",
        "model.layers.{}.mlp.up_proj.weight",
    ),
    "blocks.{}.mlp.gate_up.bias": (
        "model.layers.{}.mlp.gate_proj.bias",
        "model.layers.{}.mlp.up_proj.bias",
    ),
    "blocks.{}.mlp.down.weight": "model.layers.{}.mlp.down_proj.weight",
    "blocks.{}.mlp.down.bias": "model.layers.{}.mlp.down_proj.bias",
    "norm.weight": "model.norm.weight",
    "unembedding.weight": "lm_head.weight",
}


def without_prefix(names: Names, prefix: str) -> Names:
    """The same names, but published ones without a prefix."""
    return {
        ours: theirs.removeprefix(prefix)
        if isinstance(theirs, str)
        else tuple(name.removeprefix(prefix) for name in theirs)
        for ours, theirs in names.items()
    }


@dataclass(frozen=True, kw_only=True)
class Family:
    """One published checkpoint format, and how its authors sample from it."""

    name: str
    about: str
    architectures: tuple[str, ...]
    config: Callable[[Mapping[str, Any]], ModelConfig]
    names: Names
    method: str = "autoregressive"
    """What decodes its models where no method is chosen."""
    temperature: float = 0.0
    top_p: float = 1.0
    native: Mapping[str, Any] = field(default_factory=dict)
    """Options of a diffusion model's own decoding, as `decoding.Native` names them."""
    template: str | None = None
    """Chat template of a tokenizer that comes without one."""

    def published(self, name: str) -> tuple[str, ...]:
        """Published tensors that make our parameter `name`, in stacking order."""
        parts = name.split(".")
        layer = next((part for part in parts if part.isdigit()), "")
        theirs = self.names[".".join("{}" if part.isdigit() else part for part in parts)]
        group = (theirs,) if isinstance(theirs, str) else theirs
        return tuple(entry.format(layer) for entry in group)


def part_sizes(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Rows of each published tensor stacked in our fused parameter `name`."""
    if ".qkv." in name:
        kv = config.kv_heads * config.head_dim
        return config.heads * config.head_dim, kv, kv
    return config.mlp, config.mlp


def hugging_face_fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields that every Hugging Face decoder spells alike, as ours."""
    heads = config["num_attention_heads"]
    eos = config.get("eos_token_id")
    yield "architecture", config["architectures"][0]
    yield "vocab", config["vocab_size"]
    yield "dim", config["hidden_size"]
    yield "layers", config["num_hidden_layers"]
    yield "heads", heads
    yield "kv_heads", config.get("num_key_value_heads") or heads
    yield "head_dim", config.get("head_dim") or config["hidden_size"] // heads
    yield "mlp", config["intermediate_size"]
    yield "max_length", config.get("max_position_embeddings", 2048)
    yield "norm_eps", config.get("rms_norm_eps", 1e-6)
    yield "tied", config.get("tie_word_embeddings", False)
    yield "eos", () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    yield "mask_id", config.get("mask_token_id")
    yield "source", config
