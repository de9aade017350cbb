"""Configuration of a model, independent of the names in its family's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from outpace.decoding.target import DRAFT_KINDS, HoleOrder, Kind


@dataclass(frozen=True, kw_only=True)
class DeltaLayers:
    """Layers with a gated delta rule in place of attention."""

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Rows that the convolution before the rule sees."""
    grouped: bool = False
    """Whether rows of the projections are ordered by key head, or by part."""

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"the number of value heads must be a multiple of {self.key_heads} key heads, got "
                f"{self.value_heads}"
            )

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """Width of queries, keys and values, which the convolution mixes."""
        return 2 * self.key_size + self.value_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True, kw_only=True)
class ChainHeads:
    """Heads of a draft that chooses the tokens of a block one after another, after one pass."""

    rank: int
    """Width of the head that adds a score by the previous token; 0 without one."""
    candidates: int = 0
    """Most probable tokens of a slot that are chosen from; 0 for all tokens."""
    predicts_acceptance: bool = False
    """Whether a head predicts if the target will accept a token."""
    reads_previous: bool = False
    """Whether that head also reads the embedding of the previous token."""

    def __post_init__(self) -> None:
        if self.reads_previous and not self.rank:
            raise ValueError("a confidence head that reads the previous token needs a Markov head")


@dataclass(frozen=True, kw_only=True)
class BlockConvolution:
    """Convolutions over the rows of a block, before and after attention and MLP."""

    taps: int
    """Rows that a row sees: itself and those before it in its block."""
    group: int
    """Channels that share the part of their kernel that depends on the row."""


@dataclass(frozen=True, kw_only=True)
class GlobalHeads:
    """Heads of the layers without a window, if they differ from those of the other layers."""

    kv_heads: int
    head_dim: int
    query_factor: float
    """Factor on queries in addition to 1 / sqrt(head_dim)."""
    keys_as_values: bool = False
    """Whether the projected keys, before norm and rotation, are also the values."""


@dataclass(frozen=True, kw_only=True)
class SharedKeys:
    """The last layers, which attend to keys and values of an earlier layer.

    That is the last layer before them with the same window.
    """

    count: int
    """Number of these layers."""
    mlp: int
    """Width of their MLP."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding: base frequency, and its scaling beyond the trained length."""

    theta: float = 10_000.0
    scaling: Mapping[str, Any] | None = None
    """All published fields of its `rope_type`."""
    float32: bool = False
    """Whether queries and keys are rotated in float32, whatever the dtype of the model."""
    share: float = 1.0
    """Rotated fraction of a head, its first dimensions."""
    spread: bool = False
    """Whether this fraction is the fastest pairs of a whole head, in both of its halves."""

    def width(self, head_dim: int) -> int:
        """Return the number of columns of its tables."""
        return -(-int(head_dim * self.share) // 2) * 2


@dataclass(frozen=True, kw_only=True)
class AttentionWindow:
    """What one layer shows of the slots that a forward makes visible to a row."""

    window: int | None = None
    """Maximum distance to visible slots, exclusive; None for all slots."""
    causal: bool = False
    """Whether slots after the row are hidden."""


@dataclass(frozen=True, kw_only=True)
class ExpertGroups:
    """Groups of experts, of which each row uses a few.

    The router scores each expert and has a separate preference that counts only in the selection.
    """

    count: int
    chosen: int
    """Groups used per row."""
    scale: float
    """Factor on the weights of the experts."""


EMBEDDINGS = -1
"""Number of the embeddings among the layers of a target that a draft reads."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and choices of one decoder, translated by its family from `config.json`."""

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
    """Whether queries, and keys, are normalised over all heads at once."""
    norms: Literal["before", "after", "around"] = "before"
    """Whether attention and MLP are normalised before, after, or both ("around")."""
    norm_offset: bool = False
    """Whether 1 is added to the weights of norms."""
    local_rope: Rope | None = None
    """Rotary embedding of the layers with a window, if it differs from `rope`."""
    unrotated: tuple[int, ...] = ()
    """Layers without rotary embedding."""
    query_factor: float = 1.0
    """Factor on queries in addition to 1 / sqrt(head_dim)."""
    global_heads: GlobalHeads | None = None
    """Heads of layers without a window, if they differ."""
    keys_as_values: bool = False
    """Whether the projected keys, before norm and rotation, are also the values."""
    value_norm: bool = False
    """Whether values are normalised, without weights."""
    shared_keys: SharedKeys | None = None
    """The last layers, if they attend to keys and values of earlier ones."""
    output_gate: bool = False
    """Whether attention is multiplied by a gate of its input."""
    delta: DeltaLayers | None = None
    """Layers with a recurrent state in place of attention."""
    sinks: bool = False
    """Whether each head has an attention sink: a score that takes weight but has no value."""
    activation: str = "silu"
    """Activation of the MLP, by its name in `models/transformer.py`."""
    embedding_scale: float = 1.0
    """Factor on token embeddings."""
    layer_scale: bool = False
    """Whether the output of each layer is multiplied by a number of the checkpoint."""
    layer_input: int = 0
    """Size of the embedding of a token for each layer; 0 without one."""
    logit_cap: float = 0.0
    """Bound on logits by a hyperbolic tangent; 0 without one."""
    experts: int = 0
    """Number of experts per layer; 0 for a plain MLP."""
    experts_per_row: int = 0
    """Number of experts that a row uses."""
    norm_experts: bool = False
    """Whether the weights of a row's experts are normalised to sum to 1."""
    expert_groups: ExpertGroups | None = None
    """Groups of experts, if the router has them."""
    shared_mlp: int = 0
    """Width of an MLP that all rows use in addition to the experts."""
    shared_gate: bool = False
    """Whether that MLP is multiplied by a gate of its input."""
    experts_beside: bool = False
    """Whether experts are added to an MLP, each with norms."""
    dense_layers: int = 0
    """Number of first layers with an MLP in place of experts."""
    dense_mlp: int = 0
    """Width of the MLP in place of experts, or beside them."""
    tied: bool = False
    shift: int = 1
    """1 if row *p - 1* predicts slot *p* (every causal model, Dream), 0 if row *p* does."""
    mask_id: int | None = None
    """Token that marks a hole."""
    mask_shift: int | None = None
    """For a causal model that fills blocks, the shift of the rows of masks."""
    eos: tuple[int, ...] = ()
    windows: tuple[AttentionWindow, ...] = ()
    """Attention window of each layer; empty if no layer has one."""
    block: int | None = None
    """As in `Target`; that of a draft is its trained length, first token included."""
    order: HoleOrder = "confidence"
    eps: float = 0.0
    drawn: bool = False
    null_prompt: bool = False
    feature_layers: tuple[int, ...] = ()
    """Layers of a target whose outputs a draft reads, concatenated in this order, `EMBEDDINGS` for
    the first one's input; it borrows the target's embedding and head."""
    target_layers: int | None = None
    """Depth of the target that a draft was trained for, if published."""
    draft_vocab: int = 0
    """Vocabulary size of a draft with a separate head; 0 for the target's head."""
    own_embedding: bool = False
    """Whether a draft has a separate embedding."""
    target_head: bool = False
    """Whether a draft's head is rows of its target's, which its file does not have."""
    target_fingerprint: str | None = None
    """Digest of the weights of the target whose rows a draft was trained with, if it is stored."""
    copies_tables: bool = False
    """Whether a draft's embedding and head are copies of its target's, which are not trained."""
    norm_features: bool = False
    """Whether an EAGLE draft normalises target features before fusing them."""
    norm_residual: bool = False
    """Whether an EAGLE draft adds its attention to the normalised state."""
    precise_router: bool = False
    """Whether experts are selected and summed in float32, whatever the dtype."""
    mtp_heads: int = 0
    """Heads for multi-token prediction in the checkpoint of the model; a draft that is one of them
    has 1."""
    chain: ChainHeads | None = None
    """Heads of a draft that chooses the tokens of a block one after another."""
    convolution: BlockConvolution | None = None
    """Convolutions over the rows of a draft's block; None without them."""
    source: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The published configuration."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"the number of attention heads must be a multiple of {self.kv_heads} key/value "
                f"heads, got {self.heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"the head size must be even, got {self.head_dim}")
        if self.draft_vocab > self.vocab:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab} exceeds the vocabulary of {self.vocab}"
            )
        if self.experts_per_row > self.experts:
            raise ValueError(f"a row cannot use {self.experts_per_row} of {self.experts} experts")
        if self.convolution is not None and self.dim % self.convolution.group:
            raise ValueError(
                f"conv_group_size {self.convolution.group} must divide hidden_size {self.dim}"
            )
        if (groups := self.expert_groups) is not None:
            size, rest = divmod(self.experts, groups.count)
            if rest or size < 2 or not self.experts_per_row <= groups.chosen * size <= self.experts:
                raise ValueError(
                    f"a row cannot use {self.experts_per_row} of {self.experts} experts in "
                    f"{groups.chosen} of {groups.count} groups"
                )
        if self.mask_id is not None and not 0 <= self.mask_id < self.vocab:
            raise ValueError(f"mask_id {self.mask_id} is outside the vocabulary of {self.vocab}")
        if self.mask_id is None and self.kind not in (Kind.CAUSAL, Kind.EAGLE):
            raise ValueError(f"config.json of a {self.kind.value} must contain mask_token_id")

    @property
    def num_parameters(self) -> int:
        """Number of elements of all matrices."""
        width, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.dim * (2 * width + 2 * narrow + 3 * self.mlp)
        return self.layers * layer + self.vocab * self.dim * (1 if self.tied else 2)

    @property
    def is_uneven(self) -> bool:
        """Whether its layers differ in size, or in more than their attention windows."""
        return bool(self.global_heads or self.shared_keys or self.layer_scale or self.layer_input)

    def layer_config(self, layer: int) -> ModelConfig:
        """Return the configuration with the sizes of one layer."""
        changes: dict[str, Any] = {}
        if self.global_heads is not None and self.windows[layer].window is None:
            changes |= vars(self.global_heads)
        if self.shared_keys is not None and self.kv_layer(layer) != layer:
            changes["mlp"] = self.shared_keys.mlp
        return replace(self, **changes) if changes else self

    def kv_layer(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads: itself, unless they are shared."""
        first = self.layers if self.shared_keys is None else self.layers - self.shared_keys.count
        if layer < first:
            return layer
        return max(each for each in range(first) if self.windows[each] == self.windows[layer])

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with attention that have keys and values."""
        return tuple(
            layer
            for layer in range(self.layers)
            if self.has_attention(layer) and self.kv_layer(layer) == layer
        )

    @property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """Key/value heads and their size in each layer that has keys and values."""
        own = map(self.layer_config, self.attention_layers)
        return [(config.kv_heads, config.head_dim) for config in own]

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention, and no recurrent state."""
        return self.delta is None or layer not in self.delta.layers

    @property
    def ropes(self) -> tuple[tuple[Rope, int], ...]:
        """Each rotary embedding, with the size of its heads.

        It is that of all layers, or those of layers without and with a window.
        """
        size = self.head_dim if self.global_heads is None else self.global_heads.head_dim
        whole = (self.rope, size)
        return (whole,) if self.local_rope is None else (whole, (self.local_rope, self.head_dim))

    def layer_rope(self, layer: int) -> tuple[Rope, slice | None]:
        """Return a layer's rotary embedding, and its columns in the tables, or None for all."""
        if self.local_rope is None:
            return self.rope, None
        whole, local = (rope.width(size) for rope, size in self.ropes)
        if self.windows and self.windows[layer].window is not None:
            return self.local_rope, slice(whole, whole + local)
        return self.rope, slice(0, whole)

    @property
    def is_draft(self) -> bool:
        """Whether it reads features of a target, without which it cannot run."""
        return self.kind in DRAFT_KINDS

    @property
    def is_head(self) -> bool:
        """Whether it is a head for multi-token prediction in the checkpoint of its target."""
        return self.is_draft and self.mtp_heads > 0

    @cached_property
    def feature_size(self) -> int:
        """Width of the features of one position that a draft reads; 0 for other models."""
        return len(self.feature_layers) * self.dim

    @cached_property
    def feature_widths(self) -> tuple[int, ...]:
        """Widths of the features that a draft takes with its rows: target features, its states."""
        if self.kind is Kind.EAGLE:
            return self.feature_size, self.dim
        return (self.feature_size,) if self.kind is Kind.DFLASH_FUSED else ()

    def with_mask(self, mask_id: int) -> ModelConfig:
        """Return the same model with another mask token."""
        if self.delta is not None:
            raise ValueError(f"{self.architecture} has gated delta layers, which fill no masks")
        kind = Kind.MASK_FILLING if self.kind is Kind.CAUSAL else self.kind
        return replace(self, mask_id=mask_id, kind=kind)
