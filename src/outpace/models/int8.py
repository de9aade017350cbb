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
from outpace.kernels.autotune import choose_layout
from outpace.kernels.matmul import (
    LAYOUTS,
    MAX_CODE,
    MIN_ROW_PEAK,
    ZERO_CODE,
    bind_product,
    has_layout,
    is_tiled,
    multiply_blocks,
    to_rows,
)
from outpace.kernels.tiles import RowProduct
from outpace.models.packed import PACKED_MODULES, DenseState
from outpace.models.transformer import Embedding

LOG = logging.getLogger(__name__)

QUANTIZE_CHUNK = 2**22
"""Elements of a matrix in float32 at a time."""


@cache
def has_int8_products() -> bool:
    """Return whether this machine multiplies int8 exactly; if not, log it once."""
    if has_layout("tiles", torch.int8) or has_layout("blocks", torch.int8):
        return True
    LOG.warning(
        "this machine has no exact int8 products: quantize is ignored, and models keep their dtype"
    )
    return False


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes `i8[out, in]` of a matrix, and the scale of each row `f32[out]`."""
    codes, scale = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    step = max(QUANTIZE_CHUNK // weight.shape[1], 1)
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        part = weight[rows].float()
        scale[rows] = part.abs().amax(-1).clamp_(min=MIN_ROW_PEAK).div_(MAX_CODE)
        codes[rows] = (part / scale[rows, None]).round_().to(torch.int8)
    return codes, scale


class Int8Linear(nn.Linear, DenseState):
    """A linear layer for inference with an int8 weight, in the fastest layout for this machine."""

    matrix: Tensor
    scale: Tensor
    multiply: RowProduct

    def store_codes(self, codes: Tensor, scale: Tensor) -> None:
        """Store a quantized matrix.

        Raises:
            OptionError: if its sums may exceed 32 bits.
        """
        if codes.shape[1] > tiles.MAX_INT8_INPUTS:
            raise OptionError(
                "quantize",
                "int8",
                f"quantize='int8' supports at most {tiles.MAX_INT8_INPUTS} inputs per matrix, got "
                f"{codes.shape[1]}; omit quantize",
            )
        self.matrix, self.scale = LAYOUTS[choose_layout(codes)](codes), scale
        bias = None if self.bias is None else self.bias.detach().float()
        self.multiply = bind_product(self.matrix, bias, self.scale)
        self.weight = nn.Parameter(self.matrix, requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows `x [T, in]`."""
        return self.multiply_float32(x).to(x.dtype)

    def multiply_float32(self, x: Tensor) -> Tensor:
        """Map rows `x [T, in]` to `f32[T, out]`, without rounding to their dtype."""
        return self.multiply(x.float())

    def dense_weight(self) -> Tensor:
        """Return the matrix `f32[out, in]` by which rows are multiplied."""
        if not self.matrix.is_mkldnn:
            return to_rows(self.matrix) * self.scale[:, None]
        units = torch.full((self.in_features,) * 2, ZERO_CODE, dtype=torch.uint8)
        units.fill_diagonal_(ZERO_CODE + 1)
        return multiply_blocks(units, self.matrix, self.scale).T.contiguous()


class Int8Embedding(Embedding, DenseState):
    """An int8 embedding for inference, with a scale per token."""

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype

    def store_codes(self, codes: Tensor, scale: Tensor) -> None:
        """Store a quantized table."""
        self.codes, self.scale = codes, scale
        self.weight = nn.Parameter(codes, requires_grad=False)

    def __call__(self, ids: Tensor) -> Tensor:
        """Return embeddings `[T, dim]` of tokens `ids i64[T]`."""
        return self.dequantize_rows(ids).to(self.dtype)

    def dequantize_rows(self, ids: Tensor) -> Tensor:
        """Return embeddings `f32[T, dim]`."""
        codes = tiles.read_tile_rows(self.codes, ids) if is_tiled(self.codes) else self.codes[ids]
        return codes.float().mul_(self.scale[ids, None])

    @cached_property
    def tied_head(self) -> Int8Linear:
        """The same matrix as a head in a separate layout; large tiles serve both."""
        head = Int8Linear(self.embedding_dim, self.num_embeddings, bias=False, device="meta")
        head.store_codes(self.codes, self.scale)
        if is_tiled(head.matrix) and self.codes.nbytes >= tiles.TILED_LOOKUP_BYTES:
            self.codes, self.weight = head.matrix, head.weight
        return head

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `f32[..., vocab]` of hidden states `[..., dim]`."""
        return self.tied_head.multiply_float32(hidden)

    def dense_weight(self) -> Tensor:
        """Return the table `f32[vocab, dim]`."""
        return self.dequantize_rows(torch.arange(self.num_embeddings))


INT8_MODULES: dict[type[nn.Module], type[Int8Linear] | type[Int8Embedding]] = {
    nn.Linear: Int8Linear,
    Embedding: Int8Embedding,
}


def quantize_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Quantize the matrix of a module, if it has one; its output has dtype `dtype`."""
    if type(module) in INT8_MODULES:
        store_int8(module, *quantize_weight(module.get_parameter("weight").detach()), dtype)


def store_int8(module: nn.Module, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Convert a module to int8 codes `i8[out, in]`, scales `f32[out]` and outputs of `dtype`."""
    module.__class__ = INT8_MODULES[type(module)]
    assert isinstance(module, Int8Linear | Int8Embedding)
    if isinstance(module, Int8Embedding):
        module.dtype = dtype
    module.store_codes(codes, scale)


def is_quantized(model: nn.Module) -> bool:
    """Return whether products of a model, or of a part of it, are sums of integers."""
    kinds = (*INT8_MODULES.values(), *PACKED_MODULES.values())
    return any(type(module) in kinds for module in model.modules())
