"""What a model is, whatever its family calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.decoding.target import Kind, Order


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding: base frequency and how it is scaled beyond the trained length.

    `scaling` has the published fields of its `rope_type`, all of them.
    `float32` says that queries and keys are rotated in float32, whatever the model's dtype.
    """

    theta: float = 10_000.0
    scaling: Mapping[str, Any] | None = None
    float32: bool = False


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What of the slots that a forward lets a row see one layer shows it.

    Those fewer than `window` slots before it (None for all) and, where `causal`, none behind it.
    """

    window: int | None = None
    causal: bool = False


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
        norms_after: whether attention and MLP are normed behind and not in front.
        unrotated: layers without rotary embedding.
        experts, experts_per_row, norm_experts: MLPs of a layer where there are several, how many
            of them a row goes through, and whether their weights add up to one.
        feature_layers: layers of a target whose outputs a draft reads, side by side in this order;
            it borrows the target's embedding and head.
        draft_vocab: tokens that a draft with a head of its own may say.
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
    norms_after: bool = False
    unrotated: tuple[int, ...] = ()
    experts: int = 0
    experts_per_row: int = 0
    norm_experts: bool = False
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
        if self.mask_id is not None and not 0 <= self.mask_id < self.vocab:
            raise ValueError(
                f"mask token {self.mask_id} lies outside the vocabulary of {self.vocab}"
            )
        if self.mask_id is None and self.kind not in (Kind.CAUSAL, Kind.EXTENDING):
            raise ValueError(f"config.json of a {self.kind.value} must name its mask_token_id")

    @property
    def parameters(self) -> int:
        """Elements of all matrices."""
        width, shared = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.dim * (2 * width + 2 * shared + 3 * self.mlp)
        return self.layers * layer + self.vocab * self.dim * (1 if self.tied else 2)

    @property
    def feature_size(self) -> int:
        """Width of the features of one position that a draft reads; 0 for other models."""
        return len(self.feature_layers) * self.dim

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of what a draft takes in with its rows: a target's features, its own states."""
        return (self.feature_size, self.dim) if self.kind is Kind.EXTENDING else ()

    def with_mask(self, mask_id: int) -> ModelConfig:
        """The same model under another mask token."""
        kind = Kind.FILLING if self.kind is Kind.CAUSAL else self.kind
        return replace(self, mask_id=mask_id, kind=kind)
