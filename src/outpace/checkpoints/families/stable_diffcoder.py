"""Stable-DiffCoder: Seed-Coder, a Llama, trained to fill blocks of masks, not shifted (2026)."""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.families.family import mask_id
from outpace.checkpoints.families.llama import LLAMA
from outpace.decoding.target import Kind

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
