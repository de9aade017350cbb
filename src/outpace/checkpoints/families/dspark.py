"""DSpark drafts, and DFlash drafts of the same authors: DFlash with two heads (DeepSpec)."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

from outpace.checkpoints.families.attention_windows import FULL_WINDOWS
from outpace.checkpoints.families.dflash import DFLASH
from outpace.checkpoints.families.family import FIXED_FIELDS
from outpace.checkpoints.fields import Field, Fields, count, field, flag, some_indices
from outpace.decoding.target import Kind
from outpace.models.draft_parts import ChainHeads

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
        "sights": FULL_WINDOWS,
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
