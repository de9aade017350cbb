"""The decoder of all families: RMSNorm, rotary embedding, grouped attention and gated MLP.

Shapes: T rows (tokens of one pass, of any number of sequences), H heads, K key/value heads, D head
size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.models.attention import Attend, Attention, rotary_tables
from outpace.models.config import EMBEDDINGS, ModelConfig
from outpace.models.experts import build_feed_forward
from outpace.models.gated_delta import GatedDelta
from outpace.models.norm import build_norm

Activation = Callable[[Tensor], tuple[Tensor, Tensor]]

CLAMP_LIMIT, SIGMOID_SLOPE = 7.0, 1.702
"""Bound on gate and up projection, and slope of the sigmoid, of the clamped SwiGLU."""


def swiglu_factors(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, -1)
    return F.silu(gate), up


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU."""
    return F.gelu(x, approximate="tanh")


def geglu_factors(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, -1)
    return gelu_tanh(gate), up


def clamped_swiglu_factors(x: Tensor) -> tuple[Tensor, Tensor]:
    """A bounded SwiGLU that is linear where `up` is zero; gate and up alternate (gpt-oss)."""
    gate, up = x[..., ::2].clamp(max=CLAMP_LIMIT), x[..., 1::2].clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    return gate * torch.sigmoid(SIGMOID_SLOPE * gate), up + 1


GATED_ACTIVATIONS: dict[str, Activation] = {
    "silu": swiglu_factors,
    "gelu_tanh": geglu_factors,
    "clamped": clamped_swiglu_factors,
}


MIXED_SCALE = 2.0**-0.5
"""Factor on the sum of two parts of equal variance."""


class LayerEmbeddings(nn.Module):
    """What each layer receives of a token: an embedding, plus a projection of the input row."""

    def __init__(
        self, config: ModelConfig, build_embedding: Callable[[int, int], nn.Module]
    ) -> None:
        super().__init__()
        size, width = config.layer_input, config.layers * config.layer_input
        self.table = build_embedding(config.vocab, width)
        self.projection = nn.Linear(config.dim, width, bias=False)
        self.norm = build_norm(config, size)
        self.size, self.scale, self.row_scale = size, math.sqrt(size), config.dim**-0.5

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """Return `[T, L, S]` of tokens `ids i64[T]` whose input rows are `x [T, dim]`."""
        # The scale is rounded to the dtype first, as in the authors' code.
        found = self.table(ids) * torch.tensor(self.scale, dtype=x.dtype)
        projected: Tensor = (self.projection(x) * self.row_scale).unflatten(-1, (-1, self.size))
        mixed: Tensor = self.norm(projected) + found.view_as(projected)
        return mixed * MIXED_SCALE


class LayerGate(nn.Module):
    """A gate of the rows of a layer on their embeddings, and a projection to hidden size."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.layer_input, bias=False)
        self.projection = nn.Linear(config.layer_input, config.dim, bias=False)
        self.norm = build_norm(config)

    def forward(self, x: Tensor, layer_input: Tensor) -> Tensor:
        """Return what is added to rows `x [T, dim]`, given their input `[T, S]` of this layer."""
        added: Tensor = self.norm(self.projection(gelu_tanh(self.gate(x)) * layer_input))
        return added


class MLP(nn.Module):
    """A gated MLP (Shazeer, 2020) with gate and up projection in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.mlp, bias=config.mlp_bias)
        self.down = nn.Linear(config.mlp, config.dim, bias=config.mlp_bias)
        self.activate = GATED_ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.activate(self.gate_up(x))
        mapped: Tensor = self.down(gate * up)
        return mapped


class Block(nn.Module):
    """One layer: attention and MLP with residual connections, normalised before, after or both.

    In a gated delta layer, `attention` is the mixer that takes its place.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        before, after = config.norms != "after", config.norms != "before"
        self.attention_norm = build_norm(config) if before else None
        self.attention: Attention | GatedDelta = (
            Attention(config, layer) if config.has_attention(layer) else GatedDelta(config, layer)
        )
        self.attention_after = build_norm(config) if after else None
        self.mlp_norm = build_norm(config) if before and not config.experts_beside else None
        self.mlp = build_feed_forward(config.layer_config(layer), layer, MLP)
        self.mlp_after = build_norm(config) if after else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Map rows `x [T, dim]` and return the `wanted` ones.

        Rows `context [C, dim]`, which come first, are keys only.
        """
        y, context_rows = (
            self.attention_input(x, context),
            0 if context is None else context.shape[0],
        )
        attended: Tensor = self.attention(y, cos, sin, attend, wanted, context_rows)
        return self.finish_block(x if wanted is None else x[wanted], attended)

    def attention_input(self, x: Tensor, context: Tensor | None) -> Tensor:
        """Return the context unchanged, followed by the normalised rows."""
        y = x if self.attention_norm is None else self.attention_norm(x)
        return y if context is None else torch.cat((context, y))

    def finish_block(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add attention and MLP to rows `x [T, dim]`."""
        if self.attention_after is not None:
            attended = self.attention_after(attended)
        x = attended + x
        mapped: Tensor = self.mlp(x if self.mlp_norm is None else self.mlp_norm(x))
        return x + (mapped if self.mlp_after is None else self.mlp_after(mapped))


class ScaledBlock(Block):
    """A layer whose output is scaled, after an embedding of its tokens for this layer is added."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.scale = nn.Parameter(torch.ones(1))
        self.layer_gate = LayerGate(config) if config.layer_input else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        context: Tensor | None = None,
        layer_input: Tensor | None = None,
    ) -> Tensor:
        """Map rows `x [T, dim]` as a `Block` does, given their input `[T, size]` of this layer."""
        x = super().forward(x, cos, sin, attend, wanted, context)
        if self.layer_gate is not None and layer_input is not None:
            x = x + self.layer_gate(x, layer_input if wanted is None else layer_input[wanted])
        return x * self.scale


Context = tuple[Tensor, Tensor]
"""Features `[C, f]` that a draft reads, and their positions `i64[C]`."""


class Stack(nn.Module, ABC):
    """Layers, a final norm and rotary tables: the common part of all models.

    It has no cache, mask or method; `attend` provides them.
    """

    config: ModelConfig
    blocks: nn.ModuleList
    norm: nn.RMSNorm
    cos: Tensor
    sin: Tensor

    @abstractmethod
    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Return embeddings `[T, dim]` of tokens `ids i64[T]`."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., vocab]` of hidden states `[..., dim]`."""

    def fuse_features(self, features: Tensor) -> Tensor:
        """Return rows `[C, dim]` for the features `[C, f]` that a draft reads; drafts only."""
        raise NotImplementedError

    def input_rows(self, ids: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Return the input of the first layer, `[T, dim]`, for tokens `ids i64[T]`."""
        return self.embed_tokens(ids)

    def layer_inputs(self, ids: Tensor, x: Tensor) -> Sequence[tuple[Tensor, ...]]:
        """Return what each layer receives beside the output of the one before it.

        `x [T, dim]` are the input rows of tokens `ids i64[T]`.
        """
        return [()] * len(self.blocks)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Return hidden states after the final norm: `[T, dim]`, or `[R, dim]` if `wanted`."""
        return self.capture_layers(ids, positions, attend, (), wanted, context)[0]

    def capture_layers(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        layers: Collection[int] = (),
        wanted: Tensor | None = None,
        context: Context | None = None,
        features: Sequence[Tensor] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return hidden states of rows `ids i64[T]` after the final norm, and those of `layers`.

        Args:
            ids: tokens, `i64[T]`.
            positions: rotary positions, `i64[T]`.
            attend: attention; it receives the keys of the context before those of the rows, as
                `q [T, H, D]` and `k, v [C + T, K, D]`.
            layers: layers whose outputs to return, `EMBEDDINGS` for their input.
            wanted: rows to return, `i64[R]`; the last block computes only keys and values of
                the others.
            context: features of a draft that become keys and values only, with their positions.
            features: features that a draft takes with its rows.

        Returns:
            Hidden states `[T, dim]`, or `[R, dim]` of the `wanted` rows, and states `[T, dim]`
            by layer. Those of the last layer are taken after the final norm, as published
            drafts count them.
        """
        x, fused = self.input_rows(ids, features), None
        if context is not None:
            fused, positions = self.fuse_features(context[0]), torch.cat((context[1], positions))
        cos, sin = self.rotary_angles(positions, x.dtype)
        captured = {EMBEDDINGS: x} if EMBEDDINGS in layers else {}
        # The last block is apart: there, attention and MLP of rows that are not read are left out.
        *blocks, last = self.blocks
        *inputs, last_input = self.layer_inputs(ids, x)
        for layer, block in enumerate(blocks):
            x = block(x, cos, sin, attend, None, fused, *inputs[layer])
            if layer in layers:
                captured[layer] = x
        # If its output is captured, all rows are needed, and the wanted ones are selected later.
        if len(blocks) not in layers:
            return self.norm(last(x, cos, sin, attend, wanted, fused, *last_input)), captured
        captured[len(blocks)] = x = self.norm(last(x, cos, sin, attend, None, fused, *last_input))
        return (x if wanted is None else x[wanted]), captured

    def initialize_weights(self) -> None:
        """Initialise the matrices and create the rotary tables, once all parts exist."""
        for matrix in (p for p in self.parameters() if p.dim() == 2 and not p.is_meta):
            nn.init.normal_(matrix, std=0.02)
        for name, table in zip(("cos", "sin"), self.build_rotary_tables(), strict=True):
            self.register_buffer(name, table, persistent=False)

    def build_rotary_tables(self, positions: int | None = None) -> tuple[Tensor, Tensor]:
        """Return rotary tables, those of all ropes concatenated.

        `positions` is their length, by default that of the context.
        """
        ropes = self.config.ropes
        length = self.config.max_length if positions is None else positions
        if torch.get_default_device().type == "meta":
            # To compute on the meta device, PyTorch loads its compiler, which takes two seconds.
            shape = length, sum(rope.width(size) for rope, size in ropes)
            return torch.empty(shape), torch.empty(shape)
        cos, sin = zip(*(rotary_tables(*rope, length) for rope in ropes), strict=True)
        return torch.cat(cos, -1), torch.cat(sin, -1)

    def extend_rotary_tables(self, slots: int) -> None:
        """Extend the rotary tables to the positions that a cache of this many slots can have."""
        if (length := min(slots, self.config.max_length)) > len(self.cos):
            self.cos, self.sin = (table.to(self.cos) for table in self.build_rotary_tables(length))

    def rotary_angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine `[T, 1, D]` at `positions i64[T]`, all ropes concatenated."""
        dtype = torch.float32 if self.config.rope.float32 else dtype
        return (
            self.cos.index_select(0, positions).to(dtype).unsqueeze(1),
            self.sin.index_select(0, positions).to(dtype).unsqueeze(1),
        )


class Embedding(nn.Embedding):
    """Token embeddings, and the head of a model whose head is tied to them."""

    def reset_parameters(self) -> None:
        """Initialise the rows, except on the meta device, where PyTorch would load its compiler."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


class Transformer(Stack):
    """A decoder of any family: ids and positions in, hidden states out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab, config.dim)
        kind = ScaledBlock if config.layer_scale else Block
        self.blocks = nn.ModuleList(kind(config, layer) for layer in range(config.layers))
        self.embeddings = LayerEmbeddings(config, Embedding) if config.layer_input else None
        self.norm = build_norm(config)
        self.unembedding: nn.Module | None = None
        if not config.tied:
            self.unembedding = nn.Linear(config.dim, config.vocab, bias=False)
        self.initialize_weights()

    def embed_tokens(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.embedding(ids)
        scale = self.config.embedding_scale
        # The scale is rounded to the dtype first, as in the authors' code.
        return rows if scale == 1 else rows * torch.tensor(scale, dtype=rows.dtype)

    def layer_inputs(self, ids: Tensor, x: Tensor) -> Sequence[tuple[Tensor, ...]]:
        """Return the embeddings `[T, size]` of tokens for each layer, if the model has them."""
        if self.embeddings is None:
            return [()] * len(self.blocks)
        return [(each,) for each in self.embeddings(ids, x).unbind(1)]

    @property
    def head(self) -> nn.Module:
        """The head, or the embedding that it is tied to."""
        return self.embedding if self.unembedding is None else self.unembedding

    def compute_logits(self, hidden: Tensor, head: nn.Module | None = None) -> Tensor:
        """Return logits `[..., n]` of hidden states `[..., dim]`, by default of the whole head.

        `head` has some of its rows, see `select_rows`.
        """
        head = self.head if head is None else head
        multiply = head.compute_logits if isinstance(head, Embedding) else head
        logits: Tensor = multiply(hidden)
        cap = self.config.logit_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits
