"""Translation of GGUF metadata into the fields of a `config.json`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outpace.checkpoints.families import FAMILIES, Family
from outpace.checkpoints.families.attention_windows import (
    FULL_ATTENTION,
    LAYER_TYPES,
    SLIDING_ATTENTION,
)
from outpace.checkpoints.families.gguf_format import (
    SLIDING_WINDOW_METADATA,
    GGUFFormat,
    evaluate_fields,
    width_per_head,
)
from outpace.checkpoints.fields import (
    MAX_PUBLISHED_COUNT,
    Fields,
    are_equal,
    few,
    index,
    parse_value,
    shorten,
)
from outpace.checkpoints.gguf.file import ARCHITECTURE, TOKENIZER_MODEL, GGUFFile, MetadataArray
from outpace.errors import OptionError
from outpace.models.attention import rotary_frequencies
from outpace.models.config import Rope

LOG = logging.getLogger(__name__)
ROPE_BASE, KEY_LENGTH = "rope.freq_base", "attention.key_length"
METADATA_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    KEY_LENGTH: "head_dim",
    "attention.causal": "causal",
    SLIDING_WINDOW_METADATA: "sliding_window",
    ROPE_BASE: "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
    "block_size": "block_size",
    "norm_before_fc": "norm_before_fc",
    "norm_before_residual": "norm_before_residual",
    "target_hidden_size": "target_hidden_size",
    "target_layers": "eagle_aux_hidden_state_layer_ids",
}
"""Metadata names, after the architecture's prefix, to the usual field names."""

SCALING_FIELDS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
REQUIRED_METADATA = ("context_length", "attention.layer_norm_rms_epsilon")
"""Metadata without a default in this format; those of a `config.json` are not meant here."""

SHAPE_METADATA = ("attention.head_count_kv", KEY_LENGTH)
"""Metadata whose defaults follow from the attention heads."""

HEAD_SIZE_METADATA = ("attention.value_length", "rope.dimension_count")
"""Metadata whose value must be the head size."""

ZERO_IS_NONE = ("expert_count", "expert_used_count", SLIDING_WINDOW_METADATA)
"""Metadata that may be 0 instead of missing."""

SLIDING_PATTERN = "attention.sliding_window_pattern"
"""Metadata with the interval of layers without a window, or with whether each layer has one."""

PREDICTING_LAYERS = "nextn_predict_layers"
"""Metadata with the number of layers that predict several tokens; the last ones."""

NEUTRAL_METADATA = ("rope.scaling.finetuned", "rope.scaling.attn_factor")
DIFFUSION_PREFIX = "diffusion."
"""Prefix of metadata of diffusion models of any architecture."""

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
    name = file.metadata.get(ARCHITECTURE)
    written = [family for family in FAMILIES.values() if family.gguf is not None]
    known = [family for family in written if family.gguf and family.gguf.architecture == name]
    if not known:
        names = sorted({family.gguf.architecture for family in written if family.gguf})
        raise ValueError(
            f"{file.path}: {ARCHITECTURE} {shorten(name)} is not supported in GGUF; known are "
            f"{', '.join(names)}"
        )
    # A family with a marker comes before the one without.
    known.sort(key=lambda family: family.gguf is None or family.gguf.marker is None)
    return next(family for family in known if has_marker(file, family))


def has_marker(file: GGUFFile, family: Family) -> bool:
    form = family.gguf
    assert form is not None
    return form.marker is None or bool(file.metadata.get(f"{form.architecture}.{form.marker}"))


def gguf_format(family: Family) -> GGUFFormat:
    assert family.gguf is not None
    return family.gguf


def gguf_config_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the equivalent `config.json`.

    Raises:
        ValueError: For metadata that are not supported.
    """
    family = family_of_file(file)
    form = gguf_format(family)
    metadata = own_metadata(file, form)
    usual = {
        ours: metadata.pop(name)
        for name, ours in METADATA_FIELDS.items()
        if name in metadata and name not in form.stated
    }
    rope = {ours: metadata.pop(name) for name, ours in SCALING_FIELDS.items() if name in metadata}
    size = usual.get("head_dim") or width_per_head(usual)
    try:
        check_present(file, form)
        if metadata.pop(PREDICTING_LAYERS, 0) and "num_hidden_layers" in usual:
            layers = parse_value("block_count", usual["num_hidden_layers"], few)
            usual["num_hidden_layers"] = layers - predicting_layers(file, form)
        usual |= form.derived(metadata, usual)
        check_metadata(metadata, usual, form, size)
        usual = {
            **vocabulary_sizes(file),
            "tie_word_embeddings": "output.weight" not in file.tensors,
            **usual,
            **layer_types(metadata.pop(SLIDING_PATTERN, None)),
            **rope_scaling(file, {**form.scaling, **rope}, usual, size),
            **special_tokens(file),
        }
        fields = rename_fields(usual, form.renamed)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from None
    return {
        "architectures": [family.architectures[0]],
        "model_type": family.name,
        **evaluate_fields(form.implied, usual),
        **fields,
        # Metadata without a translation raise an error that names them, unless they are neutral.
        **{full_name(name, form): value for name, value in metadata.items()},
    }


def check_present(file: GGUFFile, form: GGUFFormat) -> None:
    """Raise `ValueError` for missing metadata whose value cannot be inferred.

    Files of Llama 1 and 2 may lack the base frequency, which is that of the format then.
    """
    base, has_tokens = full_name(ROPE_BASE, form), TOKENIZER_MODEL in file.metadata
    needed = [base, *(full_name(name, form) for name in REQUIRED_METADATA)]
    needed += form.required_tokenizer if has_tokens else ()
    missing = [name for name in needed if file.metadata.get(name) is None]
    if missing == [base] and "llama" == form.architecture == file.metadata.get(TOKENIZER_MODEL):
        LOG.warning("%s: %s is missing; it is %s, as in Llama 2", file.path, base, Rope.theta)
    elif missing:
        raise ValueError(f"{missing[0]} is missing; convert the model again")


def name_in_file(file: GGUFFile, error: OptionError) -> OptionError:
    """Return an error of a published field as one of its metadata."""
    form = gguf_format(family_of_file(file))
    for name, ours in (METADATA_FIELDS | SCALING_FIELDS).items():
        if form.renamed.get(ours, ours) == error.param:
            return error.with_param(full_name(name, form))
    return error


def vocabulary_sizes(file: GGUFFile) -> Fields:
    """Return the size of the vocabulary and, for drafts, of their part of it.

    A draft that has no embedding, since it borrows that of its target, has the target's tokens.
    """
    embedding, part = file.tensors.get("token_embd.weight"), file.tensors.get("d2t")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    size = embedding.shape[0] if embedding else len(tokens) if tokens is not None else None
    return {"vocab_size": size, **({"draft_vocab_size": part.shape[0]} if part else {})}


def own_metadata(file: GGUFFile, form: GGUFFormat) -> dict[str, Any]:
    """Return the metadata of the model, without the prefix of the architecture."""
    prefix = f"{form.architecture}."
    found = {
        name.removeprefix(prefix): convert_metadata(value)
        for name, value in file.metadata.items()
        if name.startswith((prefix, DIFFUSION_PREFIX))
    }
    return {name: value for name, value in found.items() if value or name not in ZERO_IS_NONE}


def predicting_layers(file: GGUFFile, form: GGUFFormat) -> int:
    """Return the number of layers that predict several tokens, which are not read."""
    name = full_name(PREDICTING_LAYERS, form)
    found: int = parse_value(name, file.metadata.get(name, 0), index)
    return found


def full_name(name: str, form: GGUFFormat) -> str:
    return name if name.startswith(DIFFUSION_PREFIX) else f"{form.architecture}.{name}"


def check_metadata(
    metadata: dict[str, Any], usual: Fields, form: GGUFFormat, size: int | None
) -> None:
    """Remove metadata with only one supported value; raise `ValueError` for another one."""
    for name in HEAD_SIZE_METADATA:
        # Without a head size, the metadata that it follows from are invalid.
        if (value := metadata.pop(name, size)) != size is not None:
            raise ValueError(
                f"{full_name(name, form)} must be the head size {shorten(size)}, as is "
                f"{full_name(KEY_LENGTH, form)}, got {shorten(value)}"
            )
    for name in NEUTRAL_METADATA:
        if (value := metadata.pop(name, None)) not in (None, True, False, 1.0):
            name = full_name(name, form)
            raise ValueError(f"{name} is {shorten(value)}, which is not supported")
    for name, supported in evaluate_fields(form.stated, usual).items():
        if (value := metadata.pop(name, supported)) != supported:
            name = full_name(name, form)
            raise ValueError(f"{name} must be {supported}, got {shorten(value)}")


def layer_types(pattern: Any) -> Fields:
    """Return the fields of the layers with a window: an interval, or the type of each layer."""
    if not isinstance(pattern, list):
        return {} if pattern is None else {"sliding_window_pattern": pattern}
    if any(each not in (0, 1) for each in pattern):
        raise ValueError(f"{SLIDING_PATTERN} must be a list of 0 and 1, got {shorten(pattern)}")
    kinds = FULL_ATTENTION, SLIDING_ATTENTION
    return {LAYER_TYPES: [kinds[bool(each)] for each in pattern]}


def rename_fields(fields: Fields, names: Mapping[str, str]) -> Fields:
    """Return the fields by their names in a family; raise `ValueError` for contradictory ones."""
    renamed: dict[str, Any] = {}
    for name, value in fields.items():
        ours = names.get(name, name)
        if not are_equal(renamed.setdefault(ours, value), value):
            raise ValueError(
                f"{ours} is {shorten(renamed[ours])} in one place and {shorten(value)} in another"
            )
    return renamed


def convert_metadata(value: Any) -> Any:
    """Return a number as before its rounding to 32 bits, and a short array as a list."""
    if isinstance(value, MetadataArray):
        return value.read_values() if len(value) <= MAX_PUBLISHED_COUNT else value
    return float(str(np.float32(value))) if isinstance(value, float) else value


def rope_scaling(
    file: GGUFFile, rope: Mapping[str, Any], fields: Fields, size: int | None
) -> dict[str, Any]:
    if ROPE_FACTORS in file.tensors:
        return {"rope_scaling": llama3_scaling(file, fields, size)}
    if rope.get("rope_type", "none") == "none":
        return {}
    return {"rope_scaling": dict(rope)}


def llama3_scaling(file: GGUFFile, fields: Fields, size: int | None) -> dict[str, Any]:
    theta = fields.get("rope_theta", Rope.theta)
    shape = file.tensors[ROPE_FACTORS].shape
    if (
        isinstance(size, int)
        and isinstance(theta, int | float)
        and theta > 0
        and shape == (size // 2,)
    ):
        divisors = file.read_tensor(ROPE_FACTORS).double()
        rule = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3_SCALING}
        usual, _ = rotary_frequencies(Rope(theta=theta), size)
        slower, _ = rotary_frequencies(Rope(theta=theta, scaling=rule), size)
        if torch.allclose(usual / slower, divisors, rtol=1e-4):
            return rule
    raise ValueError(
        f"tensor {ROPE_FACTORS!r} is not supported; supported: Llama 3.1's rule for "
        f"{LLAMA3_SCALING['original_max_position_embeddings']} positions"
    )


def special_tokens(file: GGUFFile) -> dict[str, Any]:
    """Return the tokens that end an answer, and the mask token."""
    names = {name: f"tokenizer.ggml.{name}" for name in (*END_TOKEN_METADATA, "mask_token_id")}
    ids = {
        field: parse_value(name, value, index)
        for field, name in names.items()
        if (value := file.metadata.get(name)) is not None
    }
    mask = {"mask_token_id": ids.pop("mask_token_id")} if "mask_token_id" in ids else {}
    return {"eos_token_id": sorted(set(ids.values())), **mask}
