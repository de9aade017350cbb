"""DFlash, DFlash 2 and DSpark drafts: Qwen3's layers between a target's embedding and head."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import Any

from outpace.checkpoints.families.attention_windows import ATTENTION_WINDOWS, FULL_WINDOWS
from outpace.checkpoints.families.family import (
    BIASES,
    DECODER,
    FIXED_FIELDS,
    HUGGING_FACE_NAMES,
    IGNORABLE,
    Family,
    replace_prefix,
)
from outpace.checkpoints.families.gguf_format import DFLASH_GGUF
from outpace.checkpoints.fields import (
    Field,
    Fields,
    choice,
    count,
    either,
    few,
    field,
    flag,
    index,
    indices,
    inner,
    merge_fields,
    some_indices,
)
from outpace.decoding.target import Kind
from outpace.models.config import EMBEDDINGS, BlockConvolution, ChainHeads

DFLASH_CONFIG, NESTED_FIELDS = (
    "dflash_config",
    ("block_size", "causal", "mask_token_id", "target_layer_ids"),
)


def parse_layers(value: Any) -> tuple[int, ...]:
    """Parse indices of target layers; an empty list is the embeddings alone."""
    return indices(value) or (EMBEDDINGS,)


TARGET_LAYER_IDS = field("target_layer_ids", parse_layers, None)
AUX_LAYER_IDS = field("eagle_aux_hidden_state_layer_ids", indices, None)
NUM_TARGET_LAYERS = field("num_target_layers", few)


def flatten_dflash(published: Fields) -> Fields:
    own = inner(published, DFLASH_CONFIG).items()
    nested = {
        name if name in NESTED_FIELDS else f"{DFLASH_CONFIG}.{name}": value for name, value in own
    }
    return merge_fields(
        {name: value for name, value in published.items() if name != DFLASH_CONFIG}, nested
    )


def dflash_feature_layers(published: Fields, ours: Fields) -> tuple[int, ...]:
    """Return the target layers that are read, from 0; evenly spread if none are listed."""
    counted = tuple(
        layer - 1 for layer in AUX_LAYER_IDS.read(published, ours) or ()
    )  # 0: the embedding
    if listed := either(
        TARGET_LAYER_IDS.read(published, ours) or (),
        counted,
        (*TARGET_LAYER_IDS.names, *AUX_LAYER_IDS.names),
    ):
        return listed
    deep, layers = NUM_TARGET_LAYERS.read(published, ours), ours["layers"]
    if layers == 1:
        return (deep // 2,)
    return tuple(round(1 + layer * (deep - 4) / (layers - 1)) for layer in range(layers))


INPUT_FUSION = f"{DFLASH_CONFIG}.input_fusion"

DFLASH = Family(
    name="dflash",
    about="DFlash: a draft that reads the hidden states of its target",
    architectures=("DFlashDraftModel",),
    checkpoints=(
        "z-lab/Qwen3-4B-DFlash-b16",
        "z-lab/Qwen3-8B-DFlash-b16",
        "z-lab/Qwen3.5-4B-DFlash",
    ),
    compared="recorded runs of its authors' code",
    fields={
        **DECODER,
        **BIASES,
        "head_dim": field("head_dim", few, 128),
        "tied": False,
        "qk_norm": True,
        "shift": 0,
        "kind": field(
            INPUT_FUSION, choice({True: Kind.DFLASH_FUSED, False: Kind.DFLASH}), Kind.DFLASH
        ),
        "mask_id": field("mask_token_id", index),
        "eos": (),
        "windows": ATTENTION_WINDOWS,
        "feature_layers": Field(
            (*TARGET_LAYER_IDS.names, *AUX_LAYER_IDS.names, *NUM_TARGET_LAYERS.names),
            dflash_feature_layers,
        ),
        "target_layers": field("num_target_layers", few, None),
        "block": field("block_size", count, 16),
    },
    fixed={
        **FIXED_FIELDS,
        "draft_vocab_size": itemgetter("vocab"),
        "target_hidden_size": itemgetter("dim"),
        "is_neox_style": True,
        "output_multiplier": 1.0,
    },
    ignored=IGNORABLE | {"tie_word_embeddings", "eos_token_id"},
    remote={"dflash.DFlashDraftModel"},
    flat=flatten_dflash,
    names={
        **replace_prefix(HUGGING_FACE_NAMES, "model."),
        "fusion.weight": "fc.weight",
        "fusion_norm.weight": "hidden_norm.weight",
        "feature_norm.weight": "feature_norm.weight",
    },
    gguf=DFLASH_GGUF,
)


MARKOV_RANK = field("markov_rank", lambda value: 0 if value == 0 else count(value))
CONFIDENCE_HEAD = field("enable_confidence_head", flag)
READS_PREVIOUS = field("confidence_head_with_markov", flag)
CHAIN_FIELDS = (*MARKOV_RANK.names, *CONFIDENCE_HEAD.names, *READS_PREVIOUS.names)


def read_chain(published: Fields, ours: Fields) -> ChainHeads | None:
    """Return the heads of a draft; None if it has neither, as a DFlash draft."""
    rank = MARKOV_RANK.read(published, ours)
    predicts = CONFIDENCE_HEAD.read(published, ours)
    if not rank and not predicts:
        return None
    reads_previous = predicts and READS_PREVIOUS.read(published, ours)
    return ChainHeads(rank=rank, predicts_acceptance=predicts, reads_previous=reads_previous)


DSPARK_HEADS = {
    "previous_embedding.weight": "markov_head.markov_w1.weight",
    "transition.weight": "markov_head.markov_w2.weight",
    "acceptance.weight": "confidence_head.proj.weight",
    "acceptance.bias": "confidence_head.proj.bias",
}

DSPARK = replace(
    DFLASH,
    name="dspark",
    about="DSpark: a DFlash draft whose tokens depend on the ones before",
    architectures=("Qwen3DSparkModel",),
    checkpoints=(
        "deepseek-ai/dspark_qwen3_4b_block7",
        "deepseek-ai/dspark_qwen3_8b_block7",
        "deepseek-ai/dflash_qwen3_4b_block7",
    ),
    compared="naive code after the published one",
    fields={
        **DFLASH.fields,
        "shift": 1,
        "kind": Kind.DFLASH,
        "windows": FULL_WINDOWS,
        "feature_layers": field("target_layer_ids", some_indices),
        "block": field("block_size", count),
        "draft_vocab": itemgetter("vocab"),
        "own_embedding": True,
        "copies_tables": True,
        "chain": Field(CHAIN_FIELDS, read_chain),
    },
    fixed={**FIXED_FIELDS, "markov_head_type": "vanilla", "tie_word_embeddings": False},
    ignored={*DFLASH.ignored, "num_anchors"},
    remote=(),
    flat=dict,
    names={**DFLASH.names, **DSPARK_HEADS},
    gguf=None,
)


TAPS = field(f"{DFLASH_CONFIG}.conv_kernel_size", count)
GROUP = field(f"{DFLASH_CONFIG}.conv_group_size", count)
RANK = field(f"{DFLASH_CONFIG}.selector_rank", count)
CANDIDATES = field(f"{DFLASH_CONFIG}.selector_top_k", count)


def read_convolution(published: Fields, ours: Fields) -> BlockConvolution:
    return BlockConvolution(taps=TAPS.read(published, ours), group=GROUP.read(published, ours))


def read_selector(published: Fields, ours: Fields) -> ChainHeads:
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
