"""Initial weights of a run: random, or from a checkpoint, unchanged or adapted."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.checkpoints.checkpoint import family_of, translate_config
from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.hub import resolve_checkpoint
from outpace.checkpoints.load import load_config, load_draft, load_model
from outpace.decoding.target import DRAFT_KINDS
from outpace.models.attention import Attention, rotate_heads
from outpace.models.config import ModelConfig
from outpace.models.draft import Draft
from outpace.models.extending import build_draft_model
from outpace.models.packed import DenseState, build_linear, select_rows
from outpace.models.transformer import Embedding, Stack, Transformer

LOG = logging.getLogger(__name__)

HEAD_STATE = {"unembedding.weight", "transition.weight", "d2t", "t2d"}


def random_model(config: Mapping[str, Any], seed: int) -> Transformer:
    """Build a model with random weights from the content of a `config.json`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(translate_config(config))


def check_trainable(config: ModelConfig) -> None:
    """Raise `ValueError` for a model with layers that training does not compute."""
    if config.delta is not None:
        raise ValueError(
            f"{config.architecture} has gated delta layers, which cannot be trained; choose a "
            "model with attention in every layer, or train a draft with this one as its target"
        )
    if config.is_uneven:
        raise ValueError(
            f"{config.architecture} has layers of different sizes, which can neither be trained "
            "nor be a target in training; choose a model whose layers are alike"
        )


def change_config(source: ModelConfig, changes: Mapping[str, Any], path: Path) -> ModelConfig:
    """Return a configuration with some published fields changed.

    If the new family uses other field names, `changes` must be a complete `config.json`.
    """
    if not changes:
        return source
    published = {**source.source, **changes}
    if family_of(published, path).names is not FAMILIES[source.family].names:
        published = dict(changes)
    return translate_config(published, path)


def adapt_checkpoint(
    init: str, changes: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> Transformer:
    """Load a checkpoint under its `config.json` with some fields changed."""
    # If the shift is removed, queries are rotated back by one position; see `shift_queries`.
    check_trainable(load_config(init))
    source = load_model(init, dtype=dtype, plain=True)
    if not changes:
        return source
    model = Transformer(
        change_config(source.config, changes, resolve_checkpoint(init) / "config.json")
    ).to(dtype)
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    weights = dict(source.named_parameters())
    if sizes != {name: parameter.shape for name, parameter in weights.items()}:
        raise ValueError(
            f"config {dict(changes)} changes the shapes of the weights of {init!r}; change only "
            "fields that keep them"
        )
    model.load_state_dict(weights)
    if model.config.shift < source.config.shift:
        shift_queries(model)
    return model


@torch.no_grad()
def shift_queries(model: Transformer) -> None:
    """Rotate the queries of all layers back by one position, in place."""
    # With a shift, the row before a slot predicts it, and its attention is trained for distances
    # from there. Without one, the slot's own row predicts it and must attend to the same slots.
    config = model.config
    for attention in model.modules():
        if not (isinstance(attention, Attention) and attention.has_rotary):
            continue
        own = attention.own_columns or slice(None)
        cos, sin = model.cos[1, own], -model.sin[1, own]
        for parameter in attention.qkv.parameters():
            heads = parameter[: config.heads * config.head_dim].unflatten(0, (config.heads, -1))
            heads.copy_(rotate_heads(heads.movedim(1, -1), cos, sin).movedim(-1, 1))


def load_trained_draft(init: str, target: Transformer) -> Draft:
    """Load a draft to train further, in float32."""
    check_draft_config(load_config(init))
    draft = load_draft(init, target, plain=True).float()
    draft.cos, draft.sin = draft.build_rotary_tables()
    return draft


def build_draft(
    config: Mapping[str, Any], target: Transformer, seed: int, source: Draft | None = None
) -> Draft:
    """Build a draft for a target from the content of a `config.json`.

    Its first weights are those of `source` that have the same names and shapes; see `cover_tokens`
    for its head.
    """
    published = check_draft_config(translate_config(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_draft_model(published, target)
    if published.copies_tables:
        copy_tables(model)
    if source is not None:
        copy_weights(model, source)
    return model


def copy_weights(draft: Draft, source: Draft) -> None:
    """Copy what has the same name and shape, except a head of some tokens."""
    held, state = source.state_dict(), draft.state_dict()
    if draft.head_tokens is not None:
        held = {key: each for key, each in held.items() if key not in HEAD_STATE}
    fitting = {k: v for k, v in held.items() if k in state and v.shape == state[k].shape}
    if all(weight.dim() < 2 or key in HEAD_STATE for key, weight in fitting.items()):
        raise ValueError(
            "[model] no layer of init has the names and shapes of config's; change config, or "
            "leave out init"
        )
    draft.load_state_dict(fitting, strict=False)
    # An added layer changes nothing at first, so that the draft proposes what it did before.
    for block in [*draft.blocks][source.config.layers :]:
        for output in (block.attention.out, block.mlp.down):
            nn.init.zeros_(output.get_parameter("weight"))
    if left := [key for key in state if key not in fitting and key not in HEAD_STATE]:
        LOG.warning("%d of %d tensors are not those of init: %s", len(left), len(state), left)


@torch.no_grad()
def cover_tokens(draft: Draft, tokens: Tensor, source: Draft | None = None) -> None:
    """Let the head of a new draft cover tokens `i64[D]`.

    Its rows are the target's. If both drafts have their own, it begins with those of `source` and,
    for tokens that `source` lacks, the target's rows by the linear map that fits those best.
    """
    draft.set_head_tokens(tokens)
    if source is not None:
        copy_transitions(draft, source)
    if draft.config.target_head:
        draft.borrow_rows(plain=True)
        return
    (target,) = draft.lender
    rows = head_rows(target, tokens)
    if source is not None and source.unembedding is not None and not source.config.target_head:
        learnt = source.unembedding.get_parameter("weight")
        covered, places = source.head_tokens, source.head_labels(tokens)
        known = places >= 0
        if covered is not None and not known.all():
            rows = rows @ torch.linalg.lstsq(head_rows(target, covered), learnt).solution
        rows[known] = learnt[places[known]]
    assert draft.unembedding is not None
    draft.unembedding.get_parameter("weight").copy_(rows)


def copy_transitions(draft: Draft, source: Draft) -> None:
    """Copy a Markov head's rows of the tokens that both heads cover."""
    ours, theirs = (each.state_dict().get("transition.weight") for each in (draft, source))
    if ours is None or theirs is None or ours.shape[1] != theirs.shape[1]:
        return
    assert (tokens := draft.head_tokens) is not None
    places = source.head_labels(tokens)
    known = places >= 0
    ours[known] = theirs[places[known]]


@torch.no_grad()
def copy_tables(draft: Draft) -> None:
    (target,), tokens = draft.lender, torch.arange(draft.config.vocab)
    assert draft.embedding is not None and draft.unembedding is not None
    draft.embedding.weight.copy_(target.embedding(tokens))
    draft.unembedding.get_parameter("weight").copy_(head_rows(target, tokens))


def head_rows(target: Transformer, tokens: Tensor) -> Tensor:
    """Return the rows `f32[n, dim]` of a target's head for tokens `i64[n]`."""
    if target.unembedding is None:
        return target.embedding(tokens).float()
    rows = select_rows(target.unembedding, tokens)
    weight = rows.dense_weight() if isinstance(rows, DenseState) else rows.get_parameter("weight")
    return weight.float()


def mark_trainable(model: Stack) -> None:
    """Let gradients be computed for all weights but a draft's rows of its target's tables."""
    model.requires_grad_(True)
    if isinstance(model, Draft) and (model.config.copies_tables or model.config.target_head):
        for table in filter(None, (model.embedding, model.unembedding)):
            table.requires_grad_(False)


def check_draft_config(config: ModelConfig) -> ModelConfig:
    """Return the configuration if it is of a trainable draft; `ValueError` otherwise."""
    if config.kind not in DRAFT_KINDS:
        raise ValueError(
            f"[model] target needs a draft that reads features, got {config.architecture}"
        )
    return config


def load_target(name: str, dtype: torch.dtype, quantize: str | None) -> Transformer:
    """Load a target, with matrices of 4 to 8 bits as `load_model` has them under `quantize`."""
    return load_model(name, dtype=dtype, quantize=quantize, plain=quantize is None)


def make_borrowed_head_dense(draft: Draft, target: Transformer) -> None:
    """Replace the quantized head of a target, in place, by a dense one if a draft borrows it."""
    # Compiled products have no gradient, and the loss of such a draft is computed by this head.
    if draft.unembedding is not None:
        return
    head = target.head
    if not isinstance(head, DenseState):
        return
    weight = head.dense_weight().to(target.norm.weight.dtype)
    if target.unembedding is None:
        outputs, inputs = weight.shape
        target.embedding = Embedding(outputs, inputs, _weight=weight)
        target.embedding.requires_grad_(False)
    else:
        target.unembedding = build_linear(weight)
