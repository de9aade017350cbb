"""How a model lies in a CPU's memory while it decodes; names, values and results stay as they are.

Which layout of a matrix is fast depends on its size, on the processor, and on the rows that a
product has: one where a causal model decodes a single sequence, more where it verifies drafts or
has company, dozens where a diffusion model shows its masks. So it is tried (`kernels/autotune.py`).
The other modules lose the machinery of hooks, whose calls cost as much as a small product.

Modules are not replaced but change their class, so that every parameter stays where it is, under
its name; `undo` gives them their own class back.
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
"""Rows that an MLP takes at a time: what lies between its matrices stays in the cache."""


class FixedLinear(nn.Linear, DenseState):
    """A linear layer for inference, whose weight lies as is quickest on this machine."""

    matrix: Tensor
    multiply: Product

    def lay_out(self, layout: str | None = None) -> None:
        """Store the weight anew, in the quickest layout or in another one."""
        weight = self.weight.detach()
        self.matrix = LAYOUTS[layout or quickest(weight)](weight)
        bias = None if self.bias is None else self.bias.detach()
        if bias is not None and is_tiled(self.matrix):
            bias = bias.float()
        self.multiply = bind_product(self.matrix, bias)
        self.weight = nn.Parameter(self.matrix, requires_grad=False)

    def undo(self) -> None:
        """Store the weight row by row again."""
        self.weight = nn.Parameter(self.dense(), requires_grad=False)
        del self.matrix, self.multiply

    # Calling the layer is calling the product, without a frame of Python between the two.
    __call__ = property(attrgetter("multiply"))

    def dense(self) -> Tensor:
        """The matrix `[out, in]` row by row."""
        return dense(self.matrix)


class FixedRouter(PreciseRouter, FixedLinear):
    """A router in float32 for inference, whose weight lies as is quickest on this machine."""

    dtype: torch.dtype

    def lay_out(self, layout: str | None = None) -> None:
        """Store the weight anew, in float32."""
        self.dtype = self.weight.dtype
        self.weight = nn.Parameter(self.weight.detach().float(), requires_grad=False)
        FixedLinear.lay_out(self, layout)

    def undo(self) -> None:
        """Store the weight row by row again, in its own dtype."""
        FixedLinear.undo(self)
        self.weight = nn.Parameter(self.weight.detach().to(self.dtype), requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Scores `f32[T, E]` of rows `x [T, dim]`."""
        return self.multiply(x.float())


class TiledEmbedding(Embedding, DenseState):
    """An embedding that is the head as well, and lies in tiles: rows are looked up there."""

    multiply: Product

    def lay_out(self) -> None:
        """Store the table anew."""
        self.weight = nn.Parameter(tiles.laid(self.weight.detach()), requires_grad=False)
        self.multiply = bind_product(self.weight.detach())

    def undo(self) -> None:
        """Store the table row by row again."""
        self.weight = nn.Parameter(self.dense(), requires_grad=False)
        del self.multiply

    def __call__(self, ids: Tensor) -> Tensor:
        """Rows `[T, dim]` of tokens `ids i64[T]`."""
        return tiles.rows(self.weight, ids)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of hidden states `[..., dim]`."""
        return self.multiply(hidden)

    def dense(self) -> Tensor:
        """The table `[vocab, dim]` row by row."""
        return dense(self.weight)


class DirectLinear(nn.Linear):
    """A linear layer that is called directly."""

    __call__ = nn.Linear.forward


class DirectAttention(Attention):
    """Attention that is called directly."""

    __call__ = Attention.forward


class DirectMLP(MLP):
    """An MLP that is called directly, for as many rows as the cache likes."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows `x [T, dim]`."""
        if len(x) > PIECE:
            return torch.cat([self(piece) for piece in x.split(PIECE)])
        gate, up = self.activate(self.gate_up(x))
        mapped: Tensor = self.down(gate.mul_(up))
        return mapped


class DirectBlock(Block):
    """A block that is called directly."""

    __call__ = Block.forward


class OwnHead(Transformer):
    """A model with a tied head, which has a layout of its own or is the embedding as it lies."""

    own: tuple[FixedLinear]

    def lay_out(self) -> None:
        """Copy the embedding; in a tuple, so that the copy does not become a parameter."""
        weight = self.embedding.weight.detach()
        head = FixedLinear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(weight, requires_grad=False)
        # A large one in float32 that does not lie in tiles is not worth the memory of its copy.
        large = weight.dtype == torch.float32 and weight.nbytes >= tiles.LARGE
        head.lay_out("rows" if large else None)
        self.own = (head,)

    def undo(self) -> None:
        """Forget the copy."""
        del self.own

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of hidden states `[..., dim]`."""
        return self.own[0](hidden)


DIRECT: dict[type[nn.Module], type[nn.Module]] = {
    **NORMS,
    nn.Linear: DirectLinear,
    Attention: DirectAttention,
    MLP: DirectMLP,
    Block: DirectBlock,
}
OWN = (FixedLinear, TiledEmbedding, DirectNorm, OwnHead)
"""Those that store something anew."""

LAID_OUT = {*DIRECT.values(), FixedLinear, FixedRouter, TiledEmbedding, OwnHead, FusedBlock}
FAST = ("tiles", "blocks")
"""Layouts that are worth another class of a module."""


def lay_out(model: Stack) -> None:
    """Choose the layout of every matrix; those of 8 bits have theirs."""
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
    """The layout of an embedding that is the head as well."""
    weight = model.embedding.weight
    if type(model.embedding) is not Embedding:  # a slice of one
        return
    if fast and weight.nbytes >= tiles.LARGE and quickest(weight) == "tiles":
        become(model.embedding, TiledEmbedding)
    elif fast:
        become(model, OwnHead)
    elif model.config.kind not in (Kind.DIFFUSION, Kind.BLOCK):
        # One row passes in two thirds of the time; looking a row up gets dearer, but costs nothing
        # beside the product.
        weight.data = by_column(weight.data)


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module the class of its layout."""
    module.__class__ = kind
    if isinstance(module, OWN):
        module.lay_out()


def undo(model: Stack) -> None:
    """Give every module its own class back, and every parameter its usual layout."""
    for module in model.modules():
        if isinstance(module, (*OWN, FusedBlock)):
            module.undo()
        if type(module) in LAID_OUT:
            module.__class__ = type(module).__bases__[0]
    for parameter in model.parameters():
        if not parameter.is_mkldnn:  # a matrix of 8 bits
            parameter.data = parameter.data.contiguous()
