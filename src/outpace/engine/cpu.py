"""Packed weights of a model on a CPU; parameter names, values and results are unchanged.

Which layout of a matrix is fastest depends on its size, on the processor, and on the rows of a
product. A causal model that decodes a single sequence has one row; verification and batches have
more, and the masks of a diffusion model dozens. So the layouts are timed (`kernels/matmul.py`).
The other modules bypass the hooks of `nn.Module.__call__`, whose overhead equals a small product.

Replaced modules keep the names of their parameters. `unpack_model` puts the original ones back.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from outpace.decoding import Kind
from outpace.kernels import tiles
from outpace.kernels.gated_delta import SequenceRows, SequenceStates, has_delta_loop, run_recurrent
from outpace.kernels.matmul import (
    LAYOUTS,
    bind_product,
    choose_layout,
    has_layout,
    is_tiled,
    to_columns,
    to_rows,
)
from outpace.models.attention import Attention
from outpace.models.experts import PreciseLinear
from outpace.models.gated_delta import GatedDelta
from outpace.models.norm import DIRECT_NORMS
from outpace.models.packed import DenseState
from outpace.models.replacement import Replacement, replace_modules, restore_modules
from outpace.models.transformer import MLP, Block, Embedding, ScaledBlock, Stack, Transformer

MLP_CHUNK_ROWS = 256
"""Rows that an MLP processes at a time, so that its intermediate values stay in the cache."""


class CpuLinear(Replacement, nn.Linear, DenseState):
    """A linear layer for inference, whose weight has the fastest layout on this machine."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = self.weight.detach()
        self.matrix = LAYOUTS[choose_layout(weight)](weight)
        bias = None if self.bias is None else self.bias.detach()
        if bias is not None and is_tiled(self.matrix):
            bias = bias.float()
        self.multiply = bind_product(self.matrix, bias)
        self.weight = nn.Parameter(self.matrix, requires_grad=False)

    def restore(self) -> nn.Module:
        self.weight = nn.Parameter(self.dense_weight(), requires_grad=False)
        return super().restore()

    # Calling the layer calls the product directly, without another Python frame.
    __call__ = property(attrgetter("multiply"))

    def dense_weight(self) -> Tensor:
        return to_rows(self.matrix)


class CpuPreciseLinear(CpuLinear, PreciseLinear):
    """A layer in float32 for inference, whose weight has the fastest layout on this machine."""

    def __init__(self, linear: PreciseLinear) -> None:
        dtype = linear.weight.dtype
        linear.weight = nn.Parameter(linear.weight.detach().float(), requires_grad=False)
        super().__init__(linear)
        self.dtype = dtype

    def restore(self) -> nn.Module:
        restored = super().restore()
        self.weight = nn.Parameter(self.weight.detach().to(self.dtype), requires_grad=False)
        return restored

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x.float())


class TiledEmbedding(Replacement, Embedding, DenseState):
    """A tied embedding in tiles, from which rows are looked up."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__(embedding)
        self.weight = nn.Parameter(tiles.to_tiles(self.weight.detach()), requires_grad=False)
        self.multiply = bind_product(self.weight.detach())

    def restore(self) -> nn.Module:
        self.weight = nn.Parameter(self.dense_weight(), requires_grad=False)
        return super().restore()

    def __call__(self, ids: Tensor) -> Tensor:
        return tiles.read_tile_rows(self.weight, ids)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.multiply(hidden)

    def dense_weight(self) -> Tensor:
        return to_rows(self.weight)


class SeparateHead(Replacement, Embedding):
    """A tied embedding whose packed matrix as a head is a separate copy."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__(embedding)
        weight = self.weight.detach()
        # A large float32 head outside the tiled layout is not worth the memory of a copy.
        large = weight.dtype == torch.float32 and weight.nbytes >= tiles.TILED_LOOKUP_BYTES
        self.head = LAYOUTS["rows" if large else choose_layout(weight)](weight)
        self.multiply = bind_product(self.head)

    __call__ = Embedding.forward

    # Computing logits calls the product directly, without another Python frame.
    compute_logits = property(attrgetter("multiply"))


class DirectLinear(Replacement, nn.Linear):
    """A linear layer without hooks."""

    __call__ = nn.Linear.forward


class DirectAttention(Replacement, Attention):
    """Attention without hooks."""

    __call__ = Attention.forward


class DirectMLP(Replacement, MLP):
    """An MLP without hooks, which processes its rows in chunks."""

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) > MLP_CHUNK_ROWS:
            return torch.cat([self(chunk) for chunk in x.split(MLP_CHUNK_ROWS)])
        gate, up = self.activate(self.gate_up(x))
        mapped: Tensor = self.down(gate.mul_(up))
        return mapped


class DirectGatedDelta(Replacement, GatedDelta):
    """A gated delta layer without hooks."""

    __call__ = GatedDelta.forward


class CpuGatedDelta(DirectGatedDelta):
    """A gated delta layer whose rows of all sequences are run by one compiled loop."""

    def run_sequences(
        self, mixed: Tensor, decay: Tensor, beta: Tensor, sequences: Sequence[SequenceRows]
    ) -> tuple[Tensor, list[SequenceStates]]:
        weight, shape = self.convolution.detach(), self.sizes.state_shape
        return run_recurrent(mixed, decay, beta, weight, sequences, shape)


class DirectBlock(Replacement, Block):
    """A block without hooks."""

    __call__ = Block.forward


class DirectScaledBlock(Replacement, ScaledBlock):
    """A scaled block without hooks."""

    __call__ = ScaledBlock.forward


DIRECT_CLASSES: dict[type[nn.Module], type[Replacement]] = {
    **DIRECT_NORMS,
    nn.Linear: DirectLinear,
    Attention: DirectAttention,
    GatedDelta: DirectGatedDelta,
    MLP: DirectMLP,
    Block: DirectBlock,
    ScaledBlock: DirectScaledBlock,
}
FAST_LAYOUTS = ("tiles", "blocks")
"""Layouts that need another class of a module."""


def pack_model(model: Stack) -> None:
    """Pack every matrix of a model on a CPU, except those of 8 bits, which are packed already."""
    weight = model.norm.weight
    if weight.device.type != "cpu":
        return
    kinds = dict(DIRECT_CLASSES)
    fast = any(has_layout(name, weight.dtype) for name in FAST_LAYOUTS)
    if fast:
        kinds[nn.Linear] = CpuLinear
    if any(has_layout(name, torch.float32) for name in FAST_LAYOUTS):
        kinds[PreciseLinear] = CpuPreciseLinear
    delta = model.config.delta
    if delta is not None and has_delta_loop(delta.state_shape, delta.taps, weight.dtype):
        kinds[GatedDelta] = CpuGatedDelta
    replace_modules(model, kinds)
    if isinstance(model, Transformer) and model.config.tied:
        pack_tied_head(model, fast)


def pack_tied_head(model: Transformer, fast: bool) -> None:
    """Pack an embedding that is also the head."""
    embedding = model.embedding
    if type(embedding) is not Embedding:  # a slice of one, in 8 bits, or packed already
        return
    weight = embedding.weight
    if fast and weight.nbytes >= tiles.TILED_LOOKUP_BYTES and choose_layout(weight) == "tiles":
        model.embedding = TiledEmbedding(embedding)
    elif fast:
        model.embedding = SeparateHead(embedding)
    elif model.config.kind not in (Kind.DIFFUSION, Kind.BLOCK):
        # A product of one row takes two thirds of the time. A look-up takes longer, but is
        # negligible compared with the product.
        weight.data = to_columns(weight.data)


def has_compiled_products(model: Stack) -> bool:
    """Return whether PyTorch multiplies none of a model's matrices: all are in tiles."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return bool(linear) and all(module.weight.dim() != 2 for module in linear)


def unpack_model(model: Stack) -> None:
    """Restore every original module, and every parameter's usual layout."""
    restore_modules(model)
    for parameter in model.parameters():
        if not parameter.is_mkldnn:  # a matrix of 8 bits
            parameter.data = parameter.data.contiguous()
