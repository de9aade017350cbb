"""Int8 matrices: weights with a scale per output, rows with a scale each.

A product is a sum of integers, which is equal in any order. The result of a row therefore depends
neither on the other rows nor on their number.
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
"""Elements of a matrix in float32 at a time."""


@cache
def exact() -> bool:
    """Return whether this machine multiplies int8 exactly; if not, log it once."""
    if has("tiles", torch.int8) or has("blocks", torch.int8):
        return True
    LOG.warning(
        "this machine has no exact int8 products: quantize is ignored, and models keep their dtype"
    )
    return False


def of_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes `i8[out, in]` of a matrix, and the scale of each row `f32[out]`."""
    codes, scale = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    step = max(PIECE // weight.shape[1], 1)
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        part = weight[rows].float()
        scale[rows] = part.abs().amax(-1).clamp_(min=TINY).div_(LEVELS)
        codes[rows] = (part / scale[rows, None]).round_().to(torch.int8)
    return codes, scale


class Int8Linear(nn.Linear, DenseState):
    """A linear layer for inference with an int8 weight, in the fastest layout for this machine."""

    matrix: Tensor
    scale: Tensor
    multiply: Product

    def hold(self, codes: Tensor, scale: Tensor) -> None:
        """Store a quantized matrix.

        Raises:
            OptionError: if its sums may exceed 32 bits.
        """
        if codes.shape[1] > tiles.LONGEST:
            raise OptionError(
                "quantize",
                "int8",
                f"quantize='int8' supports at most {tiles.LONGEST} inputs per matrix, got "
                f"{codes.shape[1]}; omit quantize",
            )
        self.matrix, self.scale = LAYOUTS[quickest(codes)](codes), scale
        bias = None if self.bias is None else self.bias.detach().float()
        self.multiply = bind_product(self.matrix, bias, self.scale)
        self.weight = nn.Parameter(self.matrix, requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows `x [T, in]`."""
        return self.unrounded(x).to(x.dtype)

    def unrounded(self, x: Tensor) -> Tensor:
        """Map rows `x [T, in]` to `f32[T, out]`, without rounding to their dtype."""
        return self.multiply(x.float())

    def dense(self) -> Tensor:
        """Return the matrix `f32[out, in]` by which rows are multiplied."""
        if not self.matrix.is_mkldnn:
            return dense(self.matrix) * self.scale[:, None]
        units = torch.full((self.in_features,) * 2, NOUGHT, dtype=torch.uint8)
        units.fill_diagonal_(NOUGHT + 1)
        return of_codes(units, self.matrix, self.scale).T.contiguous()


class Int8Embedding(Embedding, DenseState):
    """An int8 embedding for inference, with a scale per token."""

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype

    def hold(self, codes: Tensor, scale: Tensor) -> None:
        """Store a quantized table."""
        self.codes, self.scale = codes, scale
        self.weight = nn.Parameter(codes, requires_grad=False)

    def __call__(self, ids: Tensor) -> Tensor:
        """Return embeddings `[T, dim]` of tokens `ids i64[T]`."""
        return self.rows(ids).to(self.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Return embeddings `f32[T, dim]`."""
        codes = tiles.rows(self.codes, ids) if is_tiled(self.codes) else self.codes[ids]
        return codes.float().mul_(self.scale[ids, None])

    @cached_property
    def tied(self) -> Int8Linear:
        """The same matrix as a head in a separate layout; large tiles serve both."""
        head = Int8Linear(self.embedding_dim, self.num_embeddings, bias=False, device="meta")
        head.hold(self.codes, self.scale)
        if is_tiled(head.matrix) and self.codes.nbytes >= tiles.LARGE:
            self.codes, self.weight = head.matrix, head.weight
        return head

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits `f32[..., vocab]` of hidden states `[..., dim]`."""
        return self.tied.unrounded(hidden)

    def dense(self) -> Tensor:
        """Return the table `f32[vocab, dim]`."""
        return self.rows(torch.arange(self.num_embeddings))


QUANTISED: dict[type[nn.Module], type[Int8Linear] | type[Int8Embedding]] = {
    nn.Linear: Int8Linear,
    Embedding: Int8Embedding,
}


def quantise(module: nn.Module, dtype: torch.dtype) -> None:
    """Quantize the matrix of a module, if it has one; its output has dtype `dtype`."""
    if type(module) in QUANTISED:
        hold(module, *of_weight(module.get_parameter("weight").detach()), dtype)


def hold(module: nn.Module, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Convert a module to int8 codes `i8[out, in]`, scales `f32[out]` and outputs of `dtype`."""
    module.__class__ = QUANTISED[type(module)]
    assert isinstance(module, Int8Linear | Int8Embedding)
    if isinstance(module, Int8Embedding):
        module.dtype = dtype
    module.hold(codes, scale)


def is_quantised(model: nn.Module) -> bool:
    """Return whether products of a model, or of a part of it, are sums of integers."""
    kinds = (*QUANTISED.values(), *PACKED.values())
    return any(type(module) in kinds for module in model.modules())
