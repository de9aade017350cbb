"""Compiled layers: PyTorch fuses everything except attention into a few kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from types import FunctionType
from typing import TypeVar, cast

import torch
from torch import Tensor

from outpace.errors import OptionError
from outpace.field_types import check_value
from outpace.models.attention import Attend, Attention
from outpace.models.device import check_single_gpu
from outpace.models.experts import Experts
from outpace.models.replacement import Replacement
from outpace.models.transformer import Block, Stack

LOG = logging.getLogger(__name__)

BeforeAttention = Callable[
    [Block, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]
]
AfterAttention = Callable[[Block, Tensor, Tensor], Tensor]
BlockFunction = TypeVar("BlockFunction", BeforeAttention, AfterAttention)


def check_compilation(wanted: bool, device: torch.device, processes: int) -> None:
    """Raise `ValueError` where layers cannot be compiled."""
    check_value("compile", wanted, bool)
    if not wanted:
        return
    check_single_gpu("compile", device, processes)
    if find_spec("triton") is None:
        raise OptionError(
            "compile", wanted, "needs the package triton, which is part of PyTorch for a GPU"
        )


class FusedBlock(Replacement, Block):
    """A layer whose row-wise work before and after attention is compiled."""

    def __init__(self, block: Block, before: BeforeAttention, after: AfterAttention) -> None:
        super().__init__(block)
        self.before_attention, self.after_attention = before, after

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Map rows `x [T, dim]`, as a `Block` does."""
        q, k, v = self.before_attention(self, x, cos, sin, context)
        attended = attention_of(self).attend_queries(attend, q, k, v)
        if wanted is not None:
            x, attended = x[wanted], attended[wanted]
        return self.after_attention(self, x, attended)


def project_rows(
    block: Block, x: Tensor, cos: Tensor, sin: Tensor, context: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries of rows `x`, and keys and values of the context and the rows."""
    q, k, v = attention_of(block).project_qkv(block.attention_input(x, context), cos, sin)
    return q if context is None else q[context.shape[0] :], k, v


def finish_rows(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    """Return rows `x` after attention and the MLP."""
    return block.finish_block(x, attention_of(block).out(attended))


def compile_layers(model: Stack) -> None:
    """Replace the layers of a model by compiled ones; layers of one kind share their code."""
    if model.config.delta is not None:
        raise OptionError("compile", True, "cannot fuse gated delta layers: omit compile")
    if model.config.is_uneven:
        raise OptionError("compile", True, "cannot fuse layers of different sizes: omit compile")
    if any(isinstance(module, Experts) for module in model.modules()):
        raise OptionError(
            "compile", True, "cannot fuse a mixture of experts, which waits for the host"
        )
    compiled_kinds: dict[str, tuple[BeforeAttention, AfterAttention]] = {}
    for index, block in enumerate(model.blocks):
        if type(block) is not Block:
            continue
        attention = attention_of(block)
        functions = compiled_kinds.setdefault(
            repr((attention.own_columns, attention.has_rotary)),
            (compile_function(project_rows), compile_function(finish_rows)),
        )
        model.blocks[index] = FusedBlock(block, *functions)
    LOG.info("compile: %d kinds of layers, compiled when first run", len(compiled_kinds))


def attention_of(block: Block) -> Attention:
    assert isinstance(block.attention, Attention)
    return block.attention


def compile_function(function: BlockFunction) -> BlockFunction:
    """Compile a function for any number of rows.

    PyTorch limits the variants per code object, so each compiled function has a separate one.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__)
    return cast(BlockFunction, torch.compile(copy, fullgraph=True, dynamic=True))
