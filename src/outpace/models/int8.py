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
from outpace.kernels.matmul import (
    LAYOUTS,
    MAX_CODE,
    MIN_ROW_PEAK,
    ZERO_CODE,
    bind_product,
    choose_layout,
    has_layout,
    is_tiled,
    multiply_blocks,
    to_rows,
)
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
        codes[rows] = to_codes(part, scale[rows])
    return codes, scale


def to_codes(rows: Tensor, scale: Tensor) -> Tensor:
    """Return codes `i8[out, in]` of rows `f32[out, in]` by the scale of each, `f32[out]`."""
    return (rows / scale[:, None]).round_().to(torch.int8)


class Int8Linear(nn.Linear, DenseState):
    """A linear layer for inference with an int8 weight, in the fastest layout for this machine."""

    def __init__(self, codes: Tensor, scale: Tensor, bias: nn.Parameter | None = None) -> None:
        """Store codes `i8[out, in]` and scales `f32[out]`."""
        if codes.shape[1] > tiles.MAX_INT8_INPUTS:
            raise OptionError(
                "quantize",
                "int8",
                f"{codes.shape[1]} inputs exceed {tiles.MAX_INT8_INPUTS}: omit quantize",
            )
        super().__init__(codes.shape[1], codes.shape[0], bias=False, device="meta")
        self.register_parameter("bias", bias)
        self.matrix, self.scale = LAYOUTS[choose_layout(codes)](codes), scale
        wide = None if bias is None else bias.detach().float()
        self.multiply = bind_product(self.matrix, wide, scale)
        self.weight = nn.Parameter(self.matrix, requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply_float32(x).to(x.dtype)

    def multiply_float32(self, x: Tensor) -> Tensor:
        """Map rows `x [T, in]` to `f32[T, out]`, without rounding to their dtype."""
        return self.multiply(x.float())

    def dense_weight(self) -> Tensor:
        if not self.matrix.is_mkldnn:
            return to_rows(self.matrix) * self.scale[:, None]
        units = torch.full((self.in_features,) * 2, ZERO_CODE, dtype=torch.uint8)
        units.fill_diagonal_(ZERO_CODE + 1)
        return multiply_blocks(units, self.matrix, self.scale).T.contiguous()

    def select_rows(self, numbers: Tensor) -> nn.Module:
        scale = self.scale[numbers]
        return Int8Linear(to_codes(self.dense_weight()[numbers], scale), scale)


class Int8Embedding(Embedding, DenseState):
    """An int8 embedding for inference, with a scale per token."""

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        """Store codes `i8[vocab, dim]` and scales `f32[vocab]` of a table."""
        super().__init__(codes.shape[0], codes.shape[1], device="meta")
        self.codes, self.scale, self.dtype = codes, scale, dtype
        self.weight = nn.Parameter(codes, requires_grad=False)

    def __call__(self, ids: Tensor) -> Tensor:
        return self.dequantize_rows(ids).to(self.dtype)

    def dequantize_rows(self, ids: Tensor) -> Tensor:
        """Return embeddings `f32[T, dim]`."""
        codes = tiles.read_tile_rows(self.codes, ids) if is_tiled(self.codes) else self.codes[ids]
        return codes.float().mul_(self.scale[ids, None])

    @cached_property
    def tied_head(self) -> Int8Linear:
        """The same matrix as a head in a separate layout; large tiles serve both."""
        head = Int8Linear(self.codes, self.scale)
        if is_tiled(head.matrix) and self.codes.nbytes >= tiles.TILED_LOOKUP_BYTES:
            self.codes, self.weight = head.matrix, head.weight
        return head

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.tied_head.multiply_float32(hidden)

    def dense_weight(self) -> Tensor:
        return self.dequantize_rows(torch.arange(self.num_embeddings))

    def select_rows(self, numbers: Tensor) -> nn.Module:
        scale = self.scale[numbers]
        return Int8Embedding(to_codes(self.dequantize_rows(numbers), scale), scale, self.dtype)


QUANTIZABLE_MODULES = nn.Linear, Embedding
"""Classes of modules whose matrices may be stored in int8; their subclasses stay unchanged."""


def quantize_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a module with its matrix in int8 and outputs of `dtype`, if it has a matrix."""
    if type(module) not in QUANTIZABLE_MODULES:
        return module
    return int8_module(module, *quantize_weight(module.get_parameter("weight").detach()), dtype)


def int8_module(module: nn.Module, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> nn.Module:
    """Return a module with int8 codes `i8[out, in]` and scales `f32[out]` in place of another."""
    if isinstance(module, Embedding):
        return Int8Embedding(codes, scale, dtype)
    assert isinstance(module, nn.Linear)
    return Int8Linear(codes, scale, module.bias)


def is_quantized(model: nn.Module) -> bool:
    """Return whether products of a model, or of a part of it, are sums of integers."""
    kinds = (Int8Linear, Int8Embedding, *PACKED_MODULES)
    return any(isinstance(module, kinds) for module in model.modules())
