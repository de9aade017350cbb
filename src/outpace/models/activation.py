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

LIMIT, SLOPE = 7.0, 1.702
"""Bound on gate and up projection, and slope of the sigmoid, of the clamped SwiGLU."""


def silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """SwiGLU."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate), up


def gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    """GeGLU with the tanh approximation of GELU."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh"), up


def clamped(x: Tensor) -> tuple[Tensor, Tensor]:
    """A bounded SwiGLU that is linear where `up` is zero; gate and up alternate (gpt-oss)."""
    gate, up = x[..., ::2].clamp(max=LIMIT), x[..., 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(SLOPE * gate), up + 1


ACTIVATIONS: dict[str, Activation] = {"silu": silu, "gelu_tanh": gelu_tanh, "clamped": clamped}
