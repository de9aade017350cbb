"""A2D: Qwen2.5 and Qwen3 trained on masks without a causal mask, not shifted (dLLM, 2026).

Both objectives of its authors have the same `config.json`. A model of the first, MDLM, attends to
the whole canvas, one of the second, BD3LM, to whole blocks, whose length is `block_size`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from outpace.checkpoints.families.family import DECODER, FIXED_FIELDS, Family, head_dim
from outpace.checkpoints.families.qwen import QWEN3
from outpace.checkpoints.fields import Fields, choice, count, few, field, index
from outpace.checkpoints.name import name_of
from outpace.decoding.target import Kind

MODEL_TYPES = {"a2d-qwen2": False, "a2d-qwen3": True}
"""Types of the adapted model, and whether it is Qwen3."""
ARCHITECTURES = ("A2DQwen2LMHeadModel", "A2DQwen3LMHeadModel")
BLOCK_SIZE = "block_size"
QWEN2_MASK, QWEN3_MASK = 151665, 151669
"""First ids after those of the tokenizers, which the authors' code gives to `<|mask|>`."""


def default_mask(ours: Fields) -> int | None:
    """Return the mask token that the tokenizer has, if the vocabulary is a published one."""
    usual = QWEN3_MASK if ours["qk_norm"] else QWEN2_MASK
    return usual if ours["vocab"] > usual else None


A2D = Family(
    name="a2d",
    about="A2D: a diffusion model adapted from Qwen2.5 or Qwen3, bidirectional, not shifted",
    architectures=ARCHITECTURES,
    checkpoints=(
        "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1",
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1",
    ),
    compared="transformers without a causal mask",
    fields={
        "qk_norm": field("model_type", choice(MODEL_TYPES)),
        "qkv_bias": lambda ours: not ours["qk_norm"],
        **DECODER,
        "head_dim": field("head_dim", few, lambda ours: 128 if ours["qk_norm"] else head_dim(ours)),
        "shift": 0,
        "kind": Kind.DIFFUSION,
        "block": 32,
        "mask_id": field("mask_token_id", index, default_mask),
    },
    fixed={**FIXED_FIELDS, "attention_bias": lambda ours: ours["qkv_bias"]},
    ignored=QWEN3.ignored,
    remote={
        f"modeling_{base.lower()}.A2D{base}{part}"
        for base in ("Qwen2", "Qwen3")
        for part in ("Config", "Model", "LMHeadModel")
    },
    names=QWEN3.names,
    method="diffusion",
)

A2D_BLOCK = replace(
    A2D,
    name="a2d_block",
    about="A2D in blocks: block diffusion, adapted from Qwen2.5 or Qwen3, not shifted",
    architectures=(),
    aliases=dict.fromkeys(ARCHITECTURES, BLOCK_SIZE),
    checkpoints=(
        "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1",
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1",
    ),
    compared="transformers under a mask in blocks",
    fields={**A2D.fields, "kind": Kind.BLOCK, "block": field(BLOCK_SIZE, count)},
    method="block_diffusion",
)


OMITTED: Mapping[str, Mapping[str, Any]] = {
    Path(name).name.lower(): {BLOCK_SIZE: 32} for name in A2D_BLOCK.checkpoints
}


def omitted_fields(folder: Path) -> Mapping[str, Any]:
    """Return the fields that the `config.json` of a published checkpoint needs and lacks."""
    return OMITTED.get(Path(name_of(folder)).name.lower(), {})
