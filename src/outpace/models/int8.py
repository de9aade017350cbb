"""Matrices of 8 bits: weights with a scale per output, rows with a scale of their own.

A product is a sum of whole numbers, which is the same in any order. So what becomes of a row
depends neither on the rows beside it nor on how many there are.
"""

from __future__ import annotations

import logging
from functools import cache, cached_property

import torch
from torch import Tensor, nn

from outpace.errors import OptionError
from outpace.kernels import tiles
from outpace.kernels.autotune import quickest
from outpace.kernels.matmul import (
    LAYOUTS,
    LEVELS,
    NOUGHT,
    TINY,
    bind_product,
    dense,
    has,
    is_tiled,
    of_codes,
)
from outpace.kernels.tiles import Product
from outpace.models.packed import PACKED, DenseState
from outpace.models.transformer import Embedding

LOG = logging.getLogger(__name__)

PIECE = 2**22
"""Elements of a matrix that are in float32 at a time."""


@cache
def exact() -> bool:
    """Whether this machine multiplies 8 bits without a loss; if not, a line of the log says so."""
    if has("tiles", torch.int8) or has("blocks", torch.int8):
        return True
    LOG.warning(
        "this machine has no exact products of 8 bits: quantize is left out, and models keep "
        "their dtype"
    )
    return False


def of_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `i8[out, in]` of a matrix, and the scale `f32[out]` of each of its rows."""
    codes, scale = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    some = max(PIECE // weight.shape[1], 1)
    for first in range(0, len(weight), some):
        rows = slice(first, first + some)
        piece = weight[rows].float()
        scale[rows] = piece.abs().amax(-1).clamp_(min=TINY).div_(LEVELS)
        codes[rows] = (piece / scale[rows, None]).round_().to(torch.int8)
    return codes, scale


class Int8Linear(nn.Linear, DenseState):
    """A linear layer for inference whose weight has 8 bits, in the layout that is quickest here."""

    matrix: Tensor
    scale: Tensor
    multiply: Product

    def hold(self, codes: Tensor, scale: Tensor) -> None:
        """Take a matrix that is quantised already.

        Raises `ValueError` for one whose sums may exceed 32 bits.
        """
        if codes.shape[1] > tiles.LONGEST:
            raise OptionError(
                "quantize",
                "int8",
                f"quantize: a matrix has {codes.shape[1]} inputs, and sums of 8 bits hold at most "
                f"{tiles.LONGEST}; leave quantize out",
            )
        self.matrix, self.scale = LAYOUTS[quickest(codes)](codes), scale
        bias = None if self.bias is None else self.bias.detach().float()
        self.multiply = bind_product(self.matrix, bias, self.scale)
        self.weight = nn.Parameter(self.matrix, requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows `x [T, in]`."""
        return self.unrounded(x).to(x.dtype)

    def unrounded(self, x: Tensor) -> Tensor:
        """What becomes of rows `x [T, in]`, `f32[T, out]`, before it is rounded to their dtype."""
        return self.multiply(x.float())

    def dense(self) -> Tensor:
        """The matrix `f32[out, in]` that rows are multiplied by."""
        if not self.matrix.is_mkldnn:
            return dense(self.matrix) * self.scale[:, None]
        units = torch.full((self.in_features,) * 2, NOUGHT, dtype=torch.uint8)
        units.fill_diagonal_(NOUGHT + 1)
        return of_codes(units, self.matrix, self.scale).T.contiguous()


class Int8Embedding(Embedding, DenseState):
    """An embedding for inference of 8 bits, with a scale for each token."""

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype

    def hold(self, codes: Tensor, scale: Tensor) -> None:
        """Take a table that is quantised already."""
        self.codes, self.scale = codes, scale
        self.weight = nn.Parameter(codes, requires_grad=False)

    def __call__(self, ids: Tensor) -> Tensor:
        """Rows `[T, dim]` of tokens `ids i64[T]`."""
        return self.rows(ids).to(self.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `f32[T, dim]`."""
        codes = tiles.rows(self.codes, ids) if is_tiled(self.codes) else self.codes[ids]
        return codes.float().mul_(self.scale[ids, None])

    @cached_property
    def tied(self) -> Int8Linear:
        """The same matrix as a head, whose layout is its own; tiles that are large serve both."""
        head = Int8Linear(self.embedding_dim, self.num_embeddings, bias=False, device="meta")
        head.hold(self.codes, self.scale)
        if is_tiled(head.matrix) and self.codes.nbytes >= tiles.LARGE:
            self.codes, self.weight = head.matrix, head.weight
        return head

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `f32[..., vocab]` of hidden states `[..., dim]`."""
        return self.tied.unrounded(hidden)

    def dense(self) -> Tensor:
        """The table `f32[vocab, dim]`."""
        return self.rows(torch.arange(self.num_embeddings))


QUANTISED: dict[type[nn.Module], type[Int8Linear] | type[Int8Embedding]] = {
    nn.Linear: Int8Linear,
    Embedding: Int8Embedding,
}


def quantise(module: nn.Module, dtype: torch.dtype) -> None:
    """Give a module that has a matrix one of 8 bits; what it puts out is of a dtype."""
    if type(module) in QUANTISED:
        hold(module, *of_weight(module.get_parameter("weight").detach()), dtype)


def hold(module: nn.Module, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Give a module codes `i8[out, in]` and scales `f32[out]`; what it puts out is of a dtype."""
    module.__class__ = QUANTISED[type(module)]
    assert isinstance(module, Int8Linear | Int8Embedding)
    if isinstance(module, Int8Embedding):
        module.dtype = dtype
    module.hold(codes, scale)


def is_quantised(model: nn.Module) -> bool:
    """Whether products of a model, or of a part of it, are sums of whole numbers."""
    kinds = (*QUANTISED.values(), *PACKED.values())
    return any(type(module) in kinds for module in model.modules())
