"""Matrices in blocks of 4 to 8 bits, for inference on a CPU.

Products round each row to 8 bits, block by block, and sum integers (`kernels/packed.py`). The
result of a row does not depend on the other rows.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from outpace.kernels.packed import (
    PackedMatrix,
    bind_packed_product,
    dequantize_packed,
    find_packed_loop,
    select_packed_rows,
    unpack_rows,
)
from outpace.models.transformer import Embedding

LOG = logging.getLogger(__name__)


@cache
def has_packed_products() -> bool:
    """Return whether this machine multiplies packed matrices; if not, log it once."""
    if find_packed_loop():
        return True
    LOG.warning(
        "this machine cannot multiply in blocks of 4 to 8 bits (this needs AVX2 or Arm's dotprod, "
        "and a C compiler during installation): matrices have the dtype of the model"
    )
    return False


def build_linear(weight: Tensor) -> nn.Linear:
    """Return a linear layer with a frozen weight `[out, in]` and no bias."""
    linear = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def select_rows(head: nn.Module, numbers: Tensor) -> nn.Module:
    """Return a head with some rows of a head or tied embedding, by index, in the same format."""
    if isinstance(head, DenseState):
        return head.select_rows(numbers)
    weight = head.get_parameter("weight").detach()
    return build_linear(weight[numbers.to(weight.device)])


class DenseState(nn.Module, ABC):
    """A module whose weight is stored in another form and saved row by row."""

    @abstractmethod
    def dense_weight(self) -> Tensor:
        """Return the matrix `[out, in]` that the stored form represents."""

    def select_rows(self, numbers: Tensor) -> nn.Module:
        """Return a module with some outputs of this one, by index `i64[n]`."""
        return build_linear(self.dense_weight()[numbers])

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.dense_weight()


class PackedLinear(nn.Linear, DenseState):
    """A linear layer for inference whose weight stays in its block format."""

    def __init__(self, matrix: PackedMatrix, bias: nn.Parameter | None = None) -> None:
        super().__init__(matrix.inputs, matrix.outputs, bias=False, device="meta")
        self.register_parameter("bias", bias)
        self.matrix = matrix
        self.multiply = bind_packed_product(matrix, None if bias is None else bias.detach().float())
        self.weight = nn.Parameter(matrix.tiles, requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x.float()).to(x.dtype)

    def dense_weight(self) -> Tensor:
        return dequantize_packed(self.matrix)

    def select_rows(self, numbers: Tensor) -> nn.Module:
        return PackedLinear(select_packed_rows(self.matrix, numbers))


class PackedEmbedding(Embedding, DenseState):
    """An embedding for inference in its block format, whose bytes also serve a tied head."""

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype) -> None:
        super().__init__(matrix.outputs, matrix.inputs, device="meta")
        self.matrix, self.dtype, self.multiply = matrix, dtype, bind_packed_product(matrix)
        self.weight = nn.Parameter(matrix.tiles, requires_grad=False)

    def __call__(self, ids: Tensor) -> Tensor:
        return unpack_rows(self.matrix, ids).to(self.dtype)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.multiply(hidden.float())

    def dense_weight(self) -> Tensor:
        return dequantize_packed(self.matrix)

    def select_rows(self, numbers: Tensor) -> nn.Module:
        return PackedEmbedding(select_packed_rows(self.matrix, numbers), self.dtype)


PACKED_MODULES = PackedLinear, PackedEmbedding


def log_packed(name: object, model: nn.Module) -> None:
    """Log how many matrices of a model are packed, and their bytes."""
    matrices = [each for each in model.modules() if isinstance(each, (nn.Linear, nn.Embedding))]
    packed = [each.weight.nbytes for each in matrices if isinstance(each, PACKED_MODULES)]
    megabytes = sum(packed) / 1e6
    counts = (name, len(packed), len(matrices), megabytes)
    LOG.info("%s: %d of %d matrices are in blocks of 4 to 8 bits, %.0f MB", *counts)


def pack_module(module: nn.Module, matrix: PackedMatrix, dtype: torch.dtype) -> nn.Module:
    """Return a module with a packed matrix, and outputs of `dtype`, in place of another."""
    if isinstance(module, Embedding):
        return PackedEmbedding(matrix, dtype)
    assert isinstance(module, nn.Linear)
    return PackedLinear(matrix, module.bias)
