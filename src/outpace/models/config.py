"""What a model is, whatever its family calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from outpace.decoding.target import Kind, Order


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding: base frequency and how it is scaled beyond the trained length.

    `scaling` has the published fields of its `rope_type`, all of them.
    `float32` says that queries and keys are rotated in float32, whatever the model's dtype; `share`
    is the part of a head that is rotated, its first dimensions.
    """

    theta: float = 10_000.0
    scaling: Mapping[str, Any] | None = None
    float32: bool = False
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What of the slots that a forward lets a row see one layer shows it.

    Those fewer than `window` slots before it (None for all) and, where `causal`, none behind it.
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Experts in groups, of which a row goes to a few; what they say is scaled.

    The router scores each expert by itself, and has a preference that counts in the choice alone.
    """

    count: int
    chosen: int
    scale: float


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and choices of one decoder, translated by its family from `config.json`.

    Attributes:
        kind: what the model is.
        shift: 1 where row *p - 1* predicts slot *p* (every causal model, Dream), 0 where row *p*
            does.
        mask_id: the token that stands for a hole.
        sights: what each layer sees, where they differ.
        block, order, eps, drawn, null_prompt: how its authors decode it, see `Target`; the `block`
            of a draft is its trained length, its first token included.
        wide_qk_norm: whether queries, and keys, are normed over all heads at once.
        norms: whether attention and MLP are normed in front, behind, or both ("around").
        norm_offset: whether the weights of norms are what they add to one.
        local_rope: rotary embedding of the layers with a window, where it is another than `rope`.
        unrotated: layers without rotary embedding.
        query_factor: what queries are multiplied by besides 1 / sqrt(head_dim).
        sinks: whether each head has a score that takes part of the weight and has no value.
        activation: how gate and up projection meet, by its name in `models/activation.py`.
        embedding_scale: what the rows of tokens are multiplied by.
        experts, experts_per_row, norm_experts: MLPs of a layer where there are several, how many
            of them a row goes through, and whether their weights add up to one.
        expert_groups: groups of experts, where a router knows such.
        shared_mlp: width of an MLP that all rows go through beside the experts.
        dense_layers, dense_mlp: how many of the first layers have an MLP in place of experts, and
            its width.
        feature_layers: layers of a target whose outputs a draft reads, side by side in this order;
            it borrows the target's embedding and head.
        draft_vocab: tokens that a draft with a head of its own may say; 0 for the target's head.
        own_embedding: whether a draft has an embedding of its own.
        norm_features: whether the features that a draft extends are normed before they are fused.
        norm_residual: whether a draft that extends features adds its attention to the normed state.
        precise_router: whether experts are chosen and summed in float32, whatever the dtype.
        target_layers: depth of the target that a draft was made for, where it says so.
        source: the published configuration itself.
    """

    family: str
    architecture: str
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    max_length: int
    kind: Kind = Kind.CAUSAL
    norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    norms: Literal["before", "after", "around"] = "before"
    norm_offset: bool = False
    local_rope: Rope | None = None
    unrotated: tuple[int, ...] = ()
    query_factor: float = 1.0
    sinks: bool = False
    activation: str = "silu"
    embedding_scale: float = 1.0
    experts: int = 0
    experts_per_row: int = 0
    norm_experts: bool = False
    expert_groups: Groups | None = None
    shared_mlp: int = 0
    dense_layers: int = 0
    dense_mlp: int = 0
    tied: bool = False
    shift: int = 1
    mask_id: int | None = None
    eos: tuple[int, ...] = ()
    sights: tuple[Sight, ...] = ()
    block: int | None = None
    order: Order = "confidence"
    eps: float = 0.0
    drawn: bool = False
    null_prompt: bool = False
    feature_layers: tuple[int, ...] = ()
    target_layers: int | None = None
    draft_vocab: int = 0
    own_embedding: bool = False
    norm_features: bool = False
    norm_residual: bool = False
    precise_router: bool = False
    source: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key/value heads: "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise ValueError(f"a head size of {self.head_dim} is odd: rotary embedding turns pairs")
        if self.draft_vocab > self.vocab:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab} exceeds the vocabulary of {self.vocab}"
            )
        if self.experts_per_row > self.experts:
            raise ValueError(
                f"a row cannot go through {self.experts_per_row} of {self.experts} experts"
            )
        if (groups := self.expert_groups) is not None:
            self.check_groups(groups)
        if self.mask_id is not None and not 0 <= self.mask_id < self.vocab:
            raise ValueError(
                f"mask token {self.mask_id} lies outside the vocabulary of {self.vocab}"
            )
        if self.mask_id is None and self.kind not in (Kind.CAUSAL, Kind.EXTENDING):
            raise ValueError(f"config.json of a {self.kind.value} must name its mask_token_id")

    def check_groups(self, groups: Groups) -> None:
        """Raise `ValueError` for groups that a row cannot choose its experts from."""
        size, rest = divmod(self.experts, groups.count)
        if rest or size < 2 or not self.experts_per_row <= groups.chosen * size <= self.experts:
            raise ValueError(
                f"a row cannot go through {self.experts_per_row} of {self.experts} experts in "
                f"{groups.chosen} of {groups.count} groups"
            )

    @property
    def parameters(self) -> int:
        """Elements of all matrices."""
        width, shared = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.dim * (2 * width + 2 * shared + 3 * self.mlp)
        return self.layers * layer + self.vocab * self.dim * (1 if self.tied else 2)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Rotary embedding of all layers, or of those that see all and of those with a window."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def angles_of(self, layer: int) -> slice | None:
        """Columns of the rotary tables that belong to a layer; None where all of them do."""
        if self.local_rope is None:
            return None
        first = self.head_dim if self.sights and self.sights[layer].window is not None else 0
        return slice(first, first + self.head_dim)

    @cached_property
    def feature_size(self) -> int:
        """Width of the features of one position that a draft reads; 0 for other models."""
        return len(self.feature_layers) * self.dim

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Widths of what a draft takes in with its rows: a target's features, its own states."""
        if self.kind is Kind.EXTENDING:
            return self.feature_size, self.dim
        return (self.feature_size,) if self.kind is Kind.ADDING else ()

    def with_mask(self, mask_id: int) -> ModelConfig:
        """The same model under another mask token."""
        kind = Kind.FILLING if self.kind is Kind.CAUSAL else self.kind
        return replace(self, mask_id=mask_id, kind=kind)
