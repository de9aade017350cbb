"""Layers that PyTorch compiles, but for attention: a few kernels take the place of a dozen."""

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
        message = "compile needs the package triton, which PyTorch for a GPU brings along"
        raise OptionError("compile", wanted, message)


class FusedBlock(Block):
    """A layer whose work on rows, in front of attention and behind it, is compiled."""

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
        """Forget what was compiled."""
        del self.before, self.after


def before(
    block: Block, x: Tensor, cos: Tensor, sin: Tensor, context: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of rows `x`, and keys and values of the context and of them."""
    q, k, v = block.attention.project(block.normed(x, context), cos, sin)
    return q if context is None else q[context.shape[0] :], k, v


def after(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    """What becomes of rows `x` that have attended."""
    return block.rest(x, block.attention.out(attended))


def fuse(model: Stack) -> None:
    """Let the layers of a model be compiled as they first run, once for all that are alike.

    Raises `ValueError` for a model whose layers wait for the host.
    """
    if any(isinstance(module, Experts) for module in model.modules()):
        message = "compile: layers of experts wait for the host; leave compile out"
        raise OptionError("compile", True, message)
    found: dict[str, tuple[Before, After]] = {}
    for block in (block for block in model.blocks if type(block) is Block):
        functions = found.setdefault(likeness(block), (compiled(before), compiled(after)))
        block.__class__ = FusedBlock
        assert isinstance(block, FusedBlock)
        block.before, block.after = functions
    LOG.info("compile: layers of %d kinds, each as it first runs", len(found))


def likeness(block: Block) -> str:
    """What layers that share their code have in common."""
    return repr((block.attention.own_angles, block.attention.rotates))


def compiled(function: Piece) -> Piece:
    """A compiled function for any number of rows, whose variants count for it alone.

    PyTorch keeps few variants of a piece of code, so each has its own.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace()
    own = FunctionType(code, function.__globals__, function.__name__)
    return cast(Piece, torch.compile(own, fullgraph=True, dynamic=True))
