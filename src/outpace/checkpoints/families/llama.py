"""Llama 3 and models that share its format: SmolLM3, Stable-DiffCoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outpace.checkpoints.families.family import (
    BIASES,
    DECODER,
    HUGGING_FACE_NAMES,
    STRICT_DECODER,
    Family,
    mask_id,
)
from outpace.checkpoints.families.gguf_format import PAIRED_ROWS, GGUFFormat
from outpace.checkpoints.fields import Field, Fields, count, field, flag, parse_value
from outpace.decoding.target import Kind

LLAMA = Family(
    name="llama",
    about="Llama 3, 3.1, 3.2: no biases, rotary scaling for long contexts",
    architectures=("LlamaForCausalLM",),
    checkpoints=(
        "meta-llama/Meta-Llama-3-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.2-1B",
    ),
    fields={**DECODER, **BIASES, "mlp_bias": field("mlp_bias", flag, False)},
    names=HUGGING_FACE_NAMES,
    gguf=GGUFFormat(architecture="llama", rows=PAIRED_ROWS),
)


MASK, BLOCK = 5, 4
"""Mask token and block length of the authors' code; their `config.json` has neither."""

STABLE_DIFFCODER = replace(
    LLAMA,
    name="stable_diffcoder",
    about="Stable-DiffCoder: block diffusion, adapted from Seed-Coder (Llama), not shifted",
    architectures=("StableDiffcoderForCausalLM",),
    checkpoints=(
        "ByteDance-Seed/Stable-DiffCoder-8B-Base",
        "ByteDance-Seed/Stable-DiffCoder-8B-Instruct",
    ),
    compared="transformers under a mask in blocks",
    fields={
        **LLAMA.fields,
        "shift": 0,
        "kind": Kind.BLOCK,
        "mask_id": mask_id(MASK),
        "block": BLOCK,
    },
    remote={"modeling_stable_diffcoder.StableDiffcoderForCausalLM"},
    method="block_diffusion",
    gguf=None,
)


NO_ROPE_INTERVAL = field("no_rope_layer_interval", count, 4)
NO_ROPE_LAYERS = "no_rope_layers"


def parse_rope_flags(value: Any) -> list[int]:
    if isinstance(value, list) and all(type(each) is int and each in (0, 1) for each in value):
        return value
    raise ValueError("a list of 0 (no rotary embedding) and 1")


def layers_without_rope(published: Fields, ours: Fields) -> tuple[int, ...]:
    every = NO_ROPE_INTERVAL.read(published, ours)
    usual = [int((layer + 1) % every != 0) for layer in range(ours["layers"])]
    found = published.get(NO_ROPE_LAYERS)
    rotated = parse_value(NO_ROPE_LAYERS, usual if found is None else found, parse_rope_flags)
    if len(rotated) != ours["layers"]:
        raise ValueError(f"{NO_ROPE_LAYERS} must have {len(usual)} entries, got {len(rotated)}")
    return tuple(layer for layer, rotates in enumerate(rotated) if not rotates)


SMOLLM3 = Family(
    name="smollm3",
    about="SmolLM3: some layers without rotary embedding",
    architectures=("SmolLM3ForCausalLM",),
    checkpoints=("HuggingFaceTB/SmolLM3-3B",),
    fields={
        **STRICT_DECODER,
        **BIASES,
        "mlp_bias": field("mlp_bias", flag, False),
        "unrotated": Field((*NO_ROPE_INTERVAL.names, NO_ROPE_LAYERS), layers_without_rope),
    },
    names=HUGGING_FACE_NAMES,
    gguf=GGUFFormat(architecture="smollm3", rows=PAIRED_ROWS),
)
