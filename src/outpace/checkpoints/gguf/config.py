"""Translation of GGUF metadata into the fields of a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outpace.checkpoints.families import FAMILIES, Family
from outpace.checkpoints.fields import MAX_PUBLISHED_COUNT, Fields, index, parse_value, shorten
from outpace.checkpoints.gguf.file import GGUFFile
from outpace.checkpoints.gguf.header import MetadataArray
from outpace.models.config import Rope
from outpace.models.rope import rotary_frequencies

METADATA_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Metadata names, after the architecture's prefix, to field names."""

SCALING_FIELDS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
HEAD_SIZE_METADATA = {"attention.value_length": "head_dim", "rope.dimension_count": "head_dim"}
"""Metadata whose value must equal the field."""

NEUTRAL_METADATA = ("rope.scaling.finetuned", "rope.scaling.attn_factor")
END_TOKEN_METADATA = ("eos_token_id", "eot_token_id", "eom_token_id")
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of the divisors that Llama 3.1's rule applies to the frequencies."""

LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Parameters of that rule in every published model; the factor is the tensor's maximum."""


def family_of_file(file: GGUFFile) -> Family:
    """Return the family of a file.

    Raises:
        ValueError: If its architecture is not supported.
    """
    name = file.metadata.get("general.architecture")
    known = {family.gguf: family for family in FAMILIES.values() if family.gguf}
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"{file.path}: general.architecture {shorten(name)} is not supported in GGUF; "
            f"known are {', '.join(sorted(known))}"
        )
    return known[name]


def gguf_config_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the equivalent `config.json`.

    Raises:
        ValueError: For metadata that are not supported.
    """
    family = family_of_file(file)
    metadata = {
        name.removeprefix(f"{family.gguf}."): convert_metadata(value)
        for name, value in file.metadata.items()
        if name.startswith(f"{family.gguf}.")
    }
    fields = {
        ours: metadata.pop(name) for name, ours in METADATA_FIELDS.items() if name in metadata
    }
    rope = {ours: metadata.pop(name) for name, ours in SCALING_FIELDS.items() if name in metadata}
    size = fields.get("head_dim") or default_head_size(fields)
    for name in HEAD_SIZE_METADATA:
        if (value := metadata.pop(name, size)) != size:
            raise ValueError(
                f"{file.path}: {name} must be the head size {size}, got {shorten(value)}"
            )
    for name in NEUTRAL_METADATA:
        if (value := metadata.pop(name, None)) not in (None, True, False, 1.0):
            raise ValueError(f"{file.path}: {name} is {shorten(value)}, which is not supported")
    for name, supported in family.gguf_stated.items():
        if (value := metadata.pop(name, supported)) != supported:
            raise ValueError(f"{file.path}: {name} must be {supported}, got {shorten(value)}")
    embedding = file.tensors.get("token_embd.weight")
    return {
        "architectures": [family.architectures[0]],
        "model_type": family.name,
        "vocab_size": None if embedding is None else embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **fields,
        **rope_scaling(file, rope, fields, size),
        **special_tokens(file),
        # Metadata without a translation raise an error that names them, unless they are neutral.
        **{f"{family.gguf}.{name}": value for name, value in metadata.items()},
    }


def convert_metadata(value: Any) -> Any:
    """Return a number as before its rounding to 32 bits, and a short array as a list."""
    if isinstance(value, MetadataArray):
        return value.read_values() if len(value) <= MAX_PUBLISHED_COUNT else value
    return float(str(np.float32(value))) if isinstance(value, float) else value


def default_head_size(fields: Fields) -> int | None:
    """Return the head size where the metadata have none."""
    dim, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if type(dim) is int and type(heads) is int and heads > 0:
        return dim // heads
    return None


def rope_scaling(
    file: GGUFFile, rope: Mapping[str, Any], fields: Fields, size: int | None
) -> dict[str, Any]:
    """Return the scaling of the rotary embedding."""
    if ROPE_FACTORS in file.tensors:
        return {"rope_scaling": llama3_scaling(file, fields, size)}
    if rope.get("rope_type", "none") == "none":
        return {}
    return {"rope_scaling": dict(rope)}


def llama3_scaling(file: GGUFFile, fields: Fields, size: int | None) -> dict[str, Any]:
    """Return Llama 3.1's scaling.

    Raises:
        ValueError: If the stored factors do not follow that rule.
    """
    theta = fields.get("rope_theta", Rope.theta)
    shape = file.tensors[ROPE_FACTORS].shape
    if isinstance(size, int) and isinstance(theta, float) and theta > 0 and shape == (size // 2,):
        divisors = file.read_tensor(ROPE_FACTORS).double()
        rule = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3_SCALING}
        usual, _ = rotary_frequencies(Rope(theta=theta), size)
        slower, _ = rotary_frequencies(Rope(theta=theta, scaling=rule), size)
        if torch.allclose(usual / slower, divisors, rtol=1e-4):
            return rule
    raise ValueError(
        f"{file.path}: tensor {ROPE_FACTORS!r} is not supported; supported: Llama 3.1's rule for "
        f"{LLAMA3_SCALING['original_max_position_embeddings']} positions"
    )


def special_tokens(file: GGUFFile) -> dict[str, Any]:
    """Return the tokens that end an answer, and the mask token."""
    names = {name: f"tokenizer.ggml.{name}" for name in (*END_TOKEN_METADATA, "mask_token_id")}
    try:
        ids = {
            field: parse_value(name, value, index)
            for field, name in names.items()
            if (value := file.metadata.get(name)) is not None
        }
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from None
    mask = {"mask_token_id": ids.pop("mask_token_id")} if "mask_token_id" in ids else {}
    return {"eos_token_id": sorted(set(ids.values())), **mask}
