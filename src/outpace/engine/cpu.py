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
from outpace.kernels.autotune import quickest
from outpace.kernels.matmul import LAYOUTS, bind_product, by_column, dense, has, is_tiled
from outpace.kernels.tiles import Product
from outpace.models.experts import PreciseRouter
from outpace.models.int8 import is_quantised
from outpace.models.norm import DIRECT as NORMS
from outpace.models.norm import DirectNorm
from outpace.models.packed import DenseState
from outpace.models.transformer import MLP, Attention, Block, Embedding, Stack, Transformer

PIECE = 256
"""Rows that an MLP processes at a time, so that its intermediate values stay in the cache."""


class FixedLinear(nn.Linear, DenseState):
    """A linear layer for inference, whose weight has the fastest layout on this machine."""

    matrix: Tensor
    multiply: Product

    def lay_out(self, layout: str | None = None) -> None:
        """Pack the weight in the fastest layout, or in the given one."""
        weight = self.weight.detach()
        self.matrix = LAYOUTS[layout or quickest(weight)](weight)
        bias = None if self.bias is None else self.bias.detach()
        if bias is not None and is_tiled(self.matrix):
            bias = bias.float()
        self.multiply = bind_product(self.matrix, bias)
        self.weight = nn.Parameter(self.matrix, requires_grad=False)

    def undo(self) -> None:
        """Store the weight row by row."""
        self.weight = nn.Parameter(self.dense(), requires_grad=False)
        del self.matrix, self.multiply

    # Calling the layer calls the product directly, without another Python frame.
    __call__ = property(attrgetter("multiply"))

    def dense(self) -> Tensor:
        """Return the matrix `[out, in]` row by row."""
        return dense(self.matrix)


class FixedRouter(PreciseRouter, FixedLinear):
    """A router in float32 for inference, whose weight has the fastest layout on this machine."""

    dtype: torch.dtype

    def lay_out(self, layout: str | None = None) -> None:
        """Pack the weight in float32."""
        self.dtype = self.weight.dtype
        self.weight = nn.Parameter(self.weight.detach().float(), requires_grad=False)
        FixedLinear.lay_out(self, layout)

    def undo(self) -> None:
        """Store the weight row by row, in its original dtype."""
        FixedLinear.undo(self)
        self.weight = nn.Parameter(self.weight.detach().to(self.dtype), requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the scores `f32[T, E]` of rows `x [T, dim]`."""
        return self.multiply(x.float())


class TiledEmbedding(Embedding, DenseState):
    """A tied embedding in tiles, from which rows are looked up."""

    multiply: Product

    def lay_out(self) -> None:
        """Pack the table into tiles."""
        self.weight = nn.Parameter(tiles.laid(self.weight.detach()), requires_grad=False)
        self.multiply = bind_product(self.weight.detach())

    def undo(self) -> None:
        """Store the table row by row."""
        self.weight = nn.Parameter(self.dense(), requires_grad=False)
        del self.multiply

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the rows `[T, dim]` of tokens `ids i64[T]`."""
        return tiles.rows(self.weight, ids)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., vocab]` of hidden states `[..., dim]`."""
        return self.multiply(hidden)

    def dense(self) -> Tensor:
        """Return the table `[vocab, dim]` row by row."""
        return dense(self.weight)


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
        if len(x) > PIECE:
            return torch.cat([self(chunk) for chunk in x.split(PIECE)])
        gate, up = self.activate(self.gate_up(x))
        mapped: Tensor = self.down(gate.mul_(up))
        return mapped


class DirectBlock(Block):
    """A block without hooks."""

    __call__ = Block.forward


class OwnHead(Transformer):
    """A model with a tied head whose packed matrix is a separate copy of the embedding."""

    own: tuple[FixedLinear]

    def lay_out(self) -> None:
        """Copy the embedding; in a tuple, so that the copy does not become a parameter."""
        weight = self.embedding.weight.detach()
        head = FixedLinear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(weight, requires_grad=False)
        # A large float32 head outside the tiled layout is not worth the memory of a copy.
        large = weight.dtype == torch.float32 and weight.nbytes >= tiles.LARGE
        head.lay_out("rows" if large else None)
        self.own = (head,)

    def undo(self) -> None:
        """Drop the copy."""
        del self.own

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., vocab]` of hidden states `[..., dim]`."""
        return self.own[0](hidden)


DIRECT: dict[type[nn.Module], type[nn.Module]] = {
    **NORMS,
    nn.Linear: DirectLinear,
    Attention: DirectAttention,
    MLP: DirectMLP,
    Block: DirectBlock,
}
OWN = (FixedLinear, TiledEmbedding, DirectNorm, OwnHead)
"""Classes that store packed data."""

LAID_OUT = {*DIRECT.values(), FixedLinear, FixedRouter, TiledEmbedding, OwnHead, FusedBlock}
FAST = ("tiles", "blocks")
"""Layouts that need another class of a module."""


def lay_out(model: Stack) -> None:
    """Pack every matrix of a model on a CPU, except those of 8 bits, which are packed already."""
    weight = model.norm.weight
    if weight.device.type != "cpu":
        return
    fast = any(has(name, weight.dtype) for name in FAST)
    for module in model.modules():
        kind = DIRECT.get(type(module))
        if kind is DirectLinear and fast:
            kind = FixedLinear
        if type(module) is PreciseRouter and any(has(name, torch.float32) for name in FAST):
            kind = FixedRouter
        if kind is not None:
            become(module, kind)
    if isinstance(model, Transformer) and model.config.tied and not is_quantised(model.embedding):
        lay_out_head(model, fast)


def lay_out_head(model: Transformer, fast: bool) -> None:
    """Pack an embedding that is also the head."""
    weight = model.embedding.weight
    if type(model.embedding) is not Embedding:  # a slice of one
        return
    if fast and weight.nbytes >= tiles.LARGE and quickest(weight) == "tiles":
        become(model.embedding, TiledEmbedding)
    elif fast:
        become(model, OwnHead)
    elif model.config.kind not in (Kind.DIFFUSION, Kind.BLOCK):
        # A product of one row takes two thirds of the time. A look-up takes longer, but is
        # negligible compared with the product.
        weight.data = by_column(weight.data)


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module the class of its layout."""
    module.__class__ = kind
    if isinstance(module, OWN):
        module.lay_out()


def undo(model: Stack) -> None:
    """Restore every module's original class, and every parameter's usual layout."""
    for module in model.modules():
        if isinstance(module, (*OWN, FusedBlock)):
            module.undo()
        if type(module) in LAID_OUT:
            module.__class__ = type(module).__bases__[0]
    for parameter in model.parameters():
        if not parameter.is_mkldnn:  # a matrix of 8 bits
            parameter.data = parameter.data.contiguous()
