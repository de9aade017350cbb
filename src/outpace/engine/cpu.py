"""Packed weights of a model on a CPU; parameter names, values and results are unchanged.

Which layout of a matrix is fastest depends on its size, on the processor, and on the rows of a
product. A causal model that decodes a single sequence has one row; verification and batches have
more, and the masks of a diffusion model dozens. So the layouts are timed (`kernels/autotune.py`).
The other modules bypass the hooks of `nn.Module.__call__`, whose overhead equals a small product.

Modules are not replaced but change their class, so every parameter keeps its name. `unpack_model`
restores the original classes.
"""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor, nn

from outpace.decoding import Kind
from outpace.engine.fuse import FusedBlock
from outpace.kernels import tiles
from outpace.kernels.autotune import choose_layout
from outpace.kernels.matmul import LAYOUTS, bind_product, has_layout, is_tiled, to_columns, to_rows
from outpace.kernels.tiles import RowProduct
from outpace.models.experts import PreciseRouter
from outpace.models.int8 import is_quantized
from outpace.models.norm import DIRECT_NORMS as NORMS
from outpace.models.norm import DirectNorm
from outpace.models.packed import DenseState
from outpace.models.transformer import MLP, Attention, Block, Embedding, Stack, Transformer

MLP_CHUNK_ROWS = 256
"""Rows that an MLP processes at a time, so that its intermediate values stay in the cache."""


class CpuLinear(nn.Linear, DenseState):
    """A linear layer for inference, whose weight has the fastest layout on this machine."""

    matrix: Tensor
    multiply: RowProduct

    def pack_weights(self, layout: str | None = None) -> None:
        """Pack the weight in the fastest layout, or in the given one."""
        weight = self.weight.detach()
        self.matrix = LAYOUTS[layout or choose_layout(weight)](weight)
        bias = None if self.bias is None else self.bias.detach()
        if bias is not None and is_tiled(self.matrix):
            bias = bias.float()
        self.multiply = bind_product(self.matrix, bias)
        self.weight = nn.Parameter(self.matrix, requires_grad=False)

    def unpack_weights(self) -> None:
        """Store the weight row by row."""
        self.weight = nn.Parameter(self.dense_weight(), requires_grad=False)
        del self.matrix, self.multiply

    # Calling the layer calls the product directly, without another Python frame.
    __call__ = property(attrgetter("multiply"))

    def dense_weight(self) -> Tensor:
        """Return the matrix `[out, in]` row by row."""
        return to_rows(self.matrix)


class CpuRouter(PreciseRouter, CpuLinear):
    """A router in float32 for inference, whose weight has the fastest layout on this machine."""

    dtype: torch.dtype

    def pack_weights(self, layout: str | None = None) -> None:
        """Pack the weight in float32."""
        self.dtype = self.weight.dtype
        self.weight = nn.Parameter(self.weight.detach().float(), requires_grad=False)
        CpuLinear.pack_weights(self, layout)

    def unpack_weights(self) -> None:
        """Store the weight row by row, in its original dtype."""
        CpuLinear.unpack_weights(self)
        self.weight = nn.Parameter(self.weight.detach().to(self.dtype), requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the scores `f32[T, E]` of rows `x [T, dim]`."""
        return self.multiply(x.float())


class TiledEmbedding(Embedding, DenseState):
    """A tied embedding in tiles, from which rows are looked up."""

    multiply: RowProduct

    def pack_weights(self) -> None:
        """Pack the table into tiles."""
        self.weight = nn.Parameter(tiles.to_tiles(self.weight.detach()), requires_grad=False)
        self.multiply = bind_product(self.weight.detach())

    def unpack_weights(self) -> None:
        """Store the table row by row."""
        self.weight = nn.Parameter(self.dense_weight(), requires_grad=False)
        del self.multiply

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the rows `[T, dim]` of tokens `ids i64[T]`."""
        return tiles.read_tile_rows(self.weight, ids)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., vocab]` of hidden states `[..., dim]`."""
        return self.multiply(hidden)

    def dense_weight(self) -> Tensor:
        """Return the table `[vocab, dim]` row by row."""
        return to_rows(self.weight)


class DirectLinear(nn.Linear):
    """A linear layer without hooks."""

    __call__ = nn.Linear.forward


class DirectAttention(Attention):
    """Attention without hooks."""

    __call__ = Attention.forward


class DirectMLP(MLP):
    """An MLP without hooks, which processes its rows in chunks."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows `x [T, dim]`."""
        if len(x) > MLP_CHUNK_ROWS:
            return torch.cat([self(chunk) for chunk in x.split(MLP_CHUNK_ROWS)])
        gate, up = self.activate(self.gate_up(x))
        mapped: Tensor = self.down(gate.mul_(up))
        return mapped


class DirectBlock(Block):
    """A block without hooks."""

    __call__ = Block.forward


class SeparateHead(Transformer):
    """A model with a tied head whose packed matrix is a separate copy of the embedding."""

    separate_head: tuple[CpuLinear]

    def pack_weights(self) -> None:
        """Copy the embedding; in a tuple, so that the copy does not become a parameter."""
        weight = self.embedding.weight.detach()
        head = CpuLinear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(weight, requires_grad=False)
        # A large float32 head outside the tiled layout is not worth the memory of a copy.
        large = weight.dtype == torch.float32 and weight.nbytes >= tiles.TILED_LOOKUP_BYTES
        head.pack_weights("rows" if large else None)
        self.separate_head = (head,)

    def unpack_weights(self) -> None:
        """Drop the copy."""
        del self.separate_head

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., vocab]` of hidden states `[..., dim]`."""
        return self.separate_head[0](hidden)


DIRECT_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    **NORMS,
    nn.Linear: DirectLinear,
    Attention: DirectAttention,
    MLP: DirectMLP,
    Block: DirectBlock,
}
PACKING_CLASSES = (CpuLinear, TiledEmbedding, DirectNorm, SeparateHead)
"""Classes that store packed data."""

INFERENCE_CLASSES = {
    *DIRECT_CLASSES.values(),
    CpuLinear,
    CpuRouter,
    TiledEmbedding,
    SeparateHead,
    FusedBlock,
}
FAST_LAYOUTS = ("tiles", "blocks")
"""Layouts that need another class of a module."""


def pack_model(model: Stack) -> None:
    """Pack every matrix of a model on a CPU, except those of 8 bits, which are packed already."""
    weight = model.norm.weight
    if weight.device.type != "cpu":
        return
    fast = any(has_layout(name, weight.dtype) for name in FAST_LAYOUTS)
    for module in model.modules():
        kind = DIRECT_CLASSES.get(type(module))
        if kind is DirectLinear and fast:
            kind = CpuLinear
        if type(module) is PreciseRouter and any(
            has_layout(name, torch.float32) for name in FAST_LAYOUTS
        ):
            kind = CpuRouter
        if kind is not None:
            set_class(module, kind)
    if isinstance(model, Transformer) and model.config.tied and not is_quantized(model.embedding):
        pack_tied_head(model, fast)


def pack_tied_head(model: Transformer, fast: bool) -> None:
    """Pack an embedding that is also the head."""
    weight = model.embedding.weight
    if type(model.embedding) is not Embedding:  # a slice of one
        return
    if fast and weight.nbytes >= tiles.TILED_LOOKUP_BYTES and choose_layout(weight) == "tiles":
        set_class(model.embedding, TiledEmbedding)
    elif fast:
        set_class(model, SeparateHead)
    elif model.config.kind not in (Kind.DIFFUSION, Kind.BLOCK):
        # A product of one row takes two thirds of the time. A look-up takes longer, but is
        # negligible compared with the product.
        weight.data = to_columns(weight.data)


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module the class of its layout."""
    module.__class__ = kind
    if isinstance(module, PACKING_CLASSES):
        module.pack_weights()


def unpack_model(model: Stack) -> None:
    """Restore every module's original class, and every parameter's usual layout."""
    for module in model.modules():
        if isinstance(module, (*PACKING_CLASSES, FusedBlock)):
            module.unpack_weights()
        if type(module) in INFERENCE_CLASSES:
            module.__class__ = type(module).__bases__[0]
    for parameter in model.parameters():
        if not parameter.is_mkldnn:  # a matrix of 8 bits
            parameter.data = parameter.data.contiguous()
