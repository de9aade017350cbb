"""Norms, and what they are in models that run without a gradient on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.models.config import ModelConfig


class OffsetNorm(nn.RMSNorm):
    """A norm whose weights are what they add to one, in float32."""

    def reset_parameters(self) -> None:
        """Add nothing."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Norm rows `x [..., dim]`."""
        factor = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, factor, self.eps).to(x.dtype)


def norm(config: ModelConfig, size: int | None = None) -> nn.RMSNorm:
    """The norm of a model, of its hidden states or of so many numbers."""
    kind = OffsetNorm if config.norm_offset else nn.RMSNorm
    return kind(size or config.dim, config.norm_eps)


class DirectNorm(nn.RMSNorm):
    """A norm with statistics in float32; PyTorch has no fused kernel for the CPU.

    It takes half the time of PyTorch's operations on few rows, and less on many.
    """

    factor: Tensor
    small: Tensor
    root: Tensor

    def lay_out(self) -> None:
        """Make constants: a number that is a tensor is cheaper to add."""
        size = self.weight.numel()
        assert self.eps is not None
        self.factor = self.scale()
        half = self.factor.dtype != torch.float32
        self.small = torch.tensor([self.eps if half else (self.eps * size) ** 0.5])
        self.root = torch.tensor([size**0.5])

    def scale(self) -> Tensor:
        """What normed rows are multiplied by, `[dim]`."""
        return self.weight.detach()

    def undo(self) -> None:
        """Forget the constants."""
        del self.factor, self.small, self.root

    def __call__(self, x: Tensor) -> Tensor:
        """Norm rows `x [..., dim]`."""
        if x.dtype == torch.float32:
            size = torch.linalg.vector_norm(x, 2, -1, True)
            size.hypot_(self.small)
            return (x * self.factor).mul_(self.root).div_(size)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        square = torch.addcmul(self.small, size, size, value=1 / x.shape[-1])
        return (x * square.rsqrt_()).to(x.dtype) * self.factor


class DirectOffsetNorm(OffsetNorm, DirectNorm):
    """The same of a norm whose weights are what they add to one."""

    def scale(self) -> Tensor:
        """What normed rows are multiplied by, `f32[dim]`."""
        return 1.0 + self.weight.detach().float()

    def __call__(self, x: Tensor) -> Tensor:
        """Norm rows `x [..., dim]` in float32."""
        return DirectNorm.__call__(self, x.float()).to(x.dtype)


DIRECT: dict[type[nn.Module], type[DirectNorm]] = {
    nn.RMSNorm: DirectNorm,
    OffsetNorm: DirectOffsetNorm,
}
"""What a norm becomes where nothing is trained."""


def freeze(model: nn.Module) -> None:
    """Let a model run without a gradient from now on."""
    model.requires_grad_(False)
    for module in model.modules():
        kind = DIRECT.get(type(module))
        if kind is not None and next(module.parameters()).device.type == "cpu":
            module.__class__ = kind
            assert isinstance(module, DirectNorm)
            module.lay_out()
