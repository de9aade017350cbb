"""Activations of a gated MLP (Shazeer, 2020).

Each maps the stacked projection `[T, 2 * mlp]` to two factors `[T, mlp]`: the activated gate, and
what it multiplies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Callable[[Tensor], tuple[Tensor, Tensor]]

CLAMP_LIMIT, SIGMOID_SLOPE = 7.0, 1.702
"""Bound on gate and up projection, and slope of the sigmoid, of the clamped SwiGLU."""


def swiglu_factors(x: Tensor) -> tuple[Tensor, Tensor]:
    """SwiGLU."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate), up


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU."""
    return F.gelu(x, approximate="tanh")


def geglu_factors(x: Tensor) -> tuple[Tensor, Tensor]:
    """GeGLU with the tanh approximation of GELU."""
    gate, up = x.chunk(2, -1)
    return gelu_tanh(gate), up


def clamped_swiglu_factors(x: Tensor) -> tuple[Tensor, Tensor]:
    """A bounded SwiGLU that is linear where `up` is zero; gate and up alternate (gpt-oss)."""
    gate, up = x[..., ::2].clamp(max=CLAMP_LIMIT), x[..., 1::2].clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    return gate * torch.sigmoid(SIGMOID_SLOPE * gate), up + 1


GATED_ACTIVATIONS: dict[str, Activation] = {
    "silu": swiglu_factors,
    "gelu_tanh": geglu_factors,
    "clamped": clamped_swiglu_factors,
}
