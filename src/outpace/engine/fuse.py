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
from outpace.methods.method import check_type
from outpace.models.device import check_single_gpu
from outpace.models.experts import Experts
from outpace.models.transformer import Attend, Block, Stack

LOG = logging.getLogger(__name__)

Before = Callable[[Block, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]
After = Callable[[Block, Tensor, Tensor], Tensor]
Piece = TypeVar("Piece", Before, After)


def check(wanted: bool, device: torch.device, processes: int) -> None:
    """Raise `ValueError` where layers cannot be compiled."""
    check_type("compile", wanted, bool)
    if not wanted:
        return
    check_single_gpu("compile", device, processes)
    if find_spec("triton") is None:
        message = "compile needs the package triton, which is part of PyTorch for a GPU"
        raise OptionError("compile", wanted, message)


class FusedBlock(Block):
    """A layer whose row-wise work before and after attention is compiled."""

    before: Before
    after: After

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
        q, k, v = self.before(self, x, cos, sin, context)
        attended = self.attention.look(attend, q, k, v)
        if wanted is not None:
            x, attended = x[wanted], attended[wanted]
        return self.after(self, x, attended)

    def undo(self) -> None:
        """Drop the compiled functions."""
        del self.before, self.after


def before(
    block: Block, x: Tensor, cos: Tensor, sin: Tensor, context: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries of rows `x`, and keys and values of the context and the rows."""
    q, k, v = block.attention.project(block.normed(x, context), cos, sin)
    return q if context is None else q[context.shape[0] :], k, v


def after(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    """Return rows `x` after attention and the MLP."""
    return block.rest(x, block.attention.out(attended))


def fuse(model: Stack) -> None:
    """Replace the layers of a model by compiled ones; layers of one kind share their code.

    Raises:
        ValueError: the model has layers that wait for the host.
    """
    if any(isinstance(module, Experts) for module in model.modules()):
        message = "compile is not available for mixture-of-experts models, which wait for the host"
        raise OptionError("compile", True, message)
    compiled_kinds: dict[str, tuple[Before, After]] = {}
    for block in (block for block in model.blocks if type(block) is Block):
        functions = compiled_kinds.setdefault(likeness(block), (compiled(before), compiled(after)))
        block.__class__ = FusedBlock
        assert isinstance(block, FusedBlock)
        block.before, block.after = functions
    LOG.info("compile: %d kinds of layers, compiled when first run", len(compiled_kinds))


def likeness(block: Block) -> str:
    """Return a key that is equal for layers that share their code."""
    return repr((block.attention.own_angles, block.attention.rotates))


def compiled(function: Piece) -> Piece:
    """Compile a function for any number of rows.

    PyTorch limits the variants per code object, so each compiled function has a separate one.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__)
    return cast(Piece, torch.compile(copy, fullgraph=True, dynamic=True))
