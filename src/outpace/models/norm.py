"""RMS norms, and their variants for inference on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.models.config import ModelConfig
from outpace.models.replacement import Replacement, replace_modules


class OffsetNorm(nn.RMSNorm):
    """A norm in float32 that adds 1 to its weights."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, factor, self.eps).to(x.dtype)


def build_norm(config: ModelConfig, size: int | None = None) -> nn.RMSNorm:
    """Create a norm of a model, of hidden size or of `size`."""
    kind = OffsetNorm if config.norm_offset else nn.RMSNorm
    return kind(size or config.dim, config.norm_eps)


class DirectNorm(Replacement, nn.RMSNorm):
    """A norm with float32 statistics, without a fused kernel: PyTorch has none for the CPU."""

    # It takes half the time of PyTorch's operations on few rows, and less on many.

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__(norm)
        # Constants as tensors are cheaper to add than Python numbers.
        size = self.weight.numel()
        assert self.eps is not None
        self.factor = self.output_factor()
        half = self.factor.dtype != torch.float32
        self.small = torch.tensor([self.eps if half else (self.eps * size) ** 0.5])
        self.root = torch.tensor([size**0.5])

    def output_factor(self) -> Tensor:
        return self.weight.detach()

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            size = torch.linalg.vector_norm(x, 2, -1, True)
            size.hypot_(self.small)
            return (x * self.factor).mul_(self.root).div_(size)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        square = torch.addcmul(self.small, size, size, value=1 / x.shape[-1])
        return (x * square.rsqrt_()).to(x.dtype) * self.factor


class DirectOffsetNorm(DirectNorm, OffsetNorm):
    """A direct norm in float32 that adds 1 to its weights."""

    def output_factor(self) -> Tensor:
        return 1.0 + self.weight.detach().float()

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.float()).to(x.dtype)


DIRECT_NORMS: dict[type[nn.Module], type[DirectNorm]] = {
    nn.RMSNorm: DirectNorm,
    OffsetNorm: DirectOffsetNorm,
}
"""Replacement of each norm for inference."""


def freeze_model(model: nn.Module) -> None:
    """Disable gradients of a model, and use direct norms on a CPU."""
    model.requires_grad_(False)
    if next(model.parameters()).device.type == "cpu":
        replace_modules(model, DIRECT_NORMS)
