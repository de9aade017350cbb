"""How a model lies in a CPU's memory while it decodes; names, values and results stay as they are.

Which layout of a matrix is fast depends on the rows that a product has: one where a causal model
decodes a single sequence, more where it verifies drafts or has company, dozens where a diffusion
model shows its masks. A matrix of middling size is kept in two layouts. The other modules lose the
machinery of hooks, whose calls cost as much as a small product.

Modules are not replaced but change their class, so that every parameter stays where it is, under
its name; `undo` gives them their own class back.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.decoding import Kind
from outpace.models.norm import DirectNorm
from outpace.models.transformer import MLP, Attention, Block, Stack, Transformer

MEDIUM, LARGE = 2**16, 2**18
"""Elements from which on a packed product of many rows, and of one row, is worth its call."""

HUGE = 2**24
"""Elements of an embedding of which there is no second copy that is packed."""

PIECE = 256
"""Rows that an MLP takes at a time: what lies between its matrices stays in the cache."""


class FixedLinear(nn.Linear):
    """A linear layer for inference, whose float32 weight lies as is best for its size.

    That is packed into oneDNN's blocks if it is large, stored by column if it is small, and in
    between both: a single row then goes to the columns.
    """

    columns: Tensor | None
    packed: Tensor | None
    added: Tensor | None

    def lay_out(self) -> None:
        """Store the weight anew."""
        weight, size = self.weight.detach(), self.weight.numel()
        self.columns = by_column(weight) if size < LARGE else None
        self.packed = (
            torch.ops.mkldnn._reorder_linear_weight(weight, 32) if size >= MEDIUM else None
        )
        self.added = None if self.bias is None else self.bias.detach()
        kept = self.columns if self.packed is None else self.packed
        assert kept is not None
        self.weight = nn.Parameter(kept, requires_grad=False)

    def undo(self) -> None:
        """Store the weight row by row again."""
        weight = self.weight.detach()
        dense = weight.to_dense() if weight.is_mkldnn else weight.contiguous()
        self.weight = nn.Parameter(dense, requires_grad=False)
        del self.columns, self.packed, self.added

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows `x [T, in]`."""
        if self.columns is not None and (self.packed is None or x.shape[0] == 1):
            return F.linear(x, self.columns, self.added)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.added, "none", [], "")


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
        gate, up = self.gate_up(x).chunk(2, -1)
        mapped: Tensor = self.down(F.silu(gate).mul_(up))
        return mapped


class DirectBlock(Block):
    """A block that is called directly."""

    __call__ = Block.forward


class OwnHead(Transformer):
    """A model with a tied head, which has a layout of its own.

    A large embedding lies by column itself, for a single row; more go to a packed copy.
    """

    own: tuple[FixedLinear]

    def lay_out(self) -> None:
        """Copy the embedding; in a tuple, so that the copy does not become a parameter."""
        weight = self.embedding.weight.detach()
        head = FixedLinear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(weight, requires_grad=False)
        head.lay_out()
        if not weight.is_contiguous():
            head.columns = weight
        self.own = (head,)

    def undo(self) -> None:
        """Forget the copy."""
        del self.own

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of hidden states `[..., dim]`."""
        return self.own[0](hidden)


DIRECT: dict[type[nn.Module], type[nn.Module]] = {
    nn.RMSNorm: DirectNorm,
    nn.Linear: DirectLinear,
    Attention: DirectAttention,
    MLP: DirectMLP,
    Block: DirectBlock,
}
LAID_OUT = {*DIRECT.values(), FixedLinear, OwnHead}


def lay_out(model: Stack) -> None:
    """Choose the layout of every matrix, where that is known to help.

    With 4 to 100 rows, packed blocks take 0.45 to 0.85 of the time, and with one row no more. Small
    ones lose that to the call, and are best stored by column. All of this is measured with weights
    that the last pass has left outside of the processor's nearest caches.
    """
    weight = model.norm.weight
    if weight.device.type != "cpu":
        return
    fast = weight.dtype == torch.float32 and packs()
    for module in model.modules():
        kind = DIRECT.get(type(module))
        if kind is DirectLinear and fast:
            kind = FixedLinear
        if kind is not None:
            become(module, kind)
    if isinstance(model, Transformer) and model.config.tied:
        lay_out_head(model, fast)


def lay_out_head(model: Transformer, fast: bool) -> None:
    """The layout of an embedding that is the head as well."""
    weight = model.embedding.weight
    own = fast and MEDIUM <= weight.numel() < HUGE
    if weight.numel() >= (LARGE if own else MEDIUM) and model.config.kind is not Kind.DIFFUSION:
        # One row passes in two thirds of the time; looking a row up gets dearer, but costs nothing
        # beside the product.
        weight.data = by_column(weight.data)
    if own:
        become(model, OwnHead)


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module the class of its layout."""
    module.__class__ = kind
    if isinstance(module, FixedLinear | DirectNorm | OwnHead):
        module.lay_out()


def undo(model: Stack) -> None:
    """Give every module its own class back, and every parameter its usual layout."""
    for module in model.modules():
        if isinstance(module, FixedLinear | DirectNorm | OwnHead):
            module.undo()
        if type(module) in LAID_OUT:
            module.__class__ = type(module).__bases__[0]
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


def by_column(weight: Tensor) -> Tensor:
    """The same matrix, stored column by column."""
    return weight.t().contiguous().t()


def packs() -> bool:
    """Whether this build of PyTorch has oneDNN's packed products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
