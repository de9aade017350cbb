"""How the halves of a gated MLP meet (Shazeer, 2020): gate, activated, and what it multiplies.

Each maps the stacked projection `[T, 2 * mlp]` to two factors `[T, mlp]`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Callable[[Tensor], tuple[Tensor, Tensor]]

LIMIT, SLOPE = 7.0, 1.702
"""Bound on both halves, and slope of the sigmoid, of the clamped unit."""


def silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """SwiGLU."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate), up


def gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    """GeGLU, with the approximation of GELU by a tanh."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh"), up


def clamped(x: Tensor) -> tuple[Tensor, Tensor]:
    """A bounded SwiGLU that is linear where `up` is nought; gate and up alternate."""
    gate, up = x[..., ::2].clamp(max=LIMIT), x[..., 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(SLOPE * gate), up + 1


ACTIVATIONS: dict[str, Activation] = {"silu": silu, "gelu_tanh": gelu_tanh, "clamped": clamped}
