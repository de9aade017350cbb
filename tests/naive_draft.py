"""Layers of a DFlash draft written out naively, for the sizes of `helpers.published`."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6

Weights = Mapping[str, Tensor]
Finish = Callable[[Tensor], Tensor]
Surround = Callable[[Weights, str, Tensor], tuple[Tensor, Finish]]
"""Changes the input of a layer's `attention` or `mlp`; also returns how its output is changed."""


def leave_unchanged(part: Weights, name: str, y: Tensor) -> tuple[Tensor, Finish]:
    return y, lambda out: out


def random_layers(matrix: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Return the tensors of both layers under their published names; `matrix` draws one."""
    found = {}
    for layer in range(2):
        sizes = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)}
        part = {f"self_attn.{name}_proj.weight": matrix(*size) for name, size in sizes.items()}
        part |= {f"self_attn.{name}_norm.weight": 1 + matrix(8) for name in "qk"}
        part |= {f"mlp.{name}_proj.weight": matrix(48, 32) for name in ("gate", "up")}
        part["mlp.down_proj.weight"] = matrix(32, 48)
        part["input_layernorm.weight"] = 1 + matrix(32)
        part["post_attention_layernorm.weight"] = 1 + matrix(32)
        found |= {f"layers.{layer}.{name}": tensor for name, tensor in part.items()}
    return found


def normalise(x: Tensor, weight: Tensor) -> Tensor:
    """Divide by the root of the mean square."""
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """Apply the rotary embedding to heads `[n, H, 8]`."""
    angles = places[:, None].float() * 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    cos, sin = (torch.cat((f(angles),) * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin


def naive_hidden(
    weights: Weights, features: Tensor, x: Tensor, surround: Surround = leave_unchanged
) -> Tensor:
    """Return hidden states of a block with inputs `x` after all features, layer by layer."""
    context = normalise(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    count = len(context)
    places = torch.arange(count + len(x))
    for layer in range(2):
        part = {
            name.removeprefix(f"layers.{layer}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        y, finish = surround(part, "attention", normalise(x, part["input_layernorm.weight"]))
        rows = torch.cat((context, y))
        q = (y @ part["self_attn.q_proj.weight"].T).view(-1, 4, 8)
        k = (rows @ part["self_attn.k_proj.weight"].T).view(-1, 2, 8)
        v = (rows @ part["self_attn.v_proj.weight"].T).view(-1, 2, 8).repeat_interleave(2, 1)
        q = rotate(normalise(q, part["self_attn.q_norm.weight"]), places[count:])
        k = rotate(normalise(k, part["self_attn.k_norm.weight"]), places).repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + finish(mixed @ part["self_attn.o_proj.weight"].T)
        y, finish = surround(part, "mlp", normalise(x, part["post_attention_layernorm.weight"]))
        gate, up = (y @ part[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + finish((F.silu(gate) * up) @ part["mlp.down_proj.weight"].T)
    return normalise(x, weights["norm.weight"])
