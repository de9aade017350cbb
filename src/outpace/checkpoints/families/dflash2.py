"""DFlash 2 drafts: DFlash with convolutions over a block and a selector (Inco AI, 2026)."""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.families.dflash import DFLASH
from outpace.checkpoints.families.features import DFLASH_CONFIG
from outpace.checkpoints.fields import Field, Fields, count, field
from outpace.decoding.target import Kind
from outpace.models.draft_parts import BlockConvolution, ChainHeads

TAPS = field(f"{DFLASH_CONFIG}.conv_kernel_size", count)
GROUP = field(f"{DFLASH_CONFIG}.conv_group_size", count)
RANK = field(f"{DFLASH_CONFIG}.selector_rank", count)
CANDIDATES = field(f"{DFLASH_CONFIG}.selector_top_k", count)


def read_convolution(published: Fields, ours: Fields) -> BlockConvolution:
    """Return the sizes of the convolutions."""
    return BlockConvolution(taps=TAPS.read(published, ours), group=GROUP.read(published, ours))


def read_selector(published: Fields, ours: Fields) -> ChainHeads:
    """Return the sizes of the selector."""
    return ChainHeads(rank=RANK.read(published, ours), candidates=CANDIDATES.read(published, ours))


KERNELS = {"base": "base_kernel", "projection.weight": "kernel_projection.weight"}

DFLASH2_NAMES = {
    "previous_embedding.weight": "candidate_selector.predecessor_codebook",
    "candidate_embedding.weight": "candidate_selector.successor_codebook",
    "selector.weight": "candidate_selector.hidden_projection.weight",
    **{
        f"blocks.{{}}.{part}_convolution.{ours}": f"layers.{{}}.{part}_conv.{theirs}"
        for part in ("attention", "mlp")
        for ours, theirs in KERNELS.items()
    },
}

DFLASH2 = replace(
    DFLASH,
    name="dflash2",
    about="DFlash 2: a DFlash draft with convolutions and a selector of candidates",
    architectures=("DFlash2DraftModel",),
    checkpoints=("z-lab/Qwen3.8-27B-DFlash2",),
    compared="naive code after the published one",
    fields={
        **DFLASH.fields,
        "kind": Kind.DFLASH,
        "convolution": Field((*TAPS.names, *GROUP.names), read_convolution),
        "chain": Field((*RANK.names, *CANDIDATES.names), read_selector),
    },
    fixed={
        **DFLASH.fixed,
        f"{DFLASH_CONFIG}.input_embedding_scale": 1.0,
        f"{DFLASH_CONFIG}.output_multiplier": 1.0,
        f"{DFLASH_CONFIG}.final_logit_softcapping": None,
    },
    remote=(),
    names={**DFLASH.names, **DFLASH2_NAMES},
    gguf=None,
)
