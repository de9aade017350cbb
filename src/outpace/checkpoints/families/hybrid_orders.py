"""Orders of rows and columns of gated delta layers in GGUF files.

llama.cpp numbers the value heads of Qwen3.5 so that those of one key head are as far apart as
possible: a repetition of all key heads then fits them. Qwen3-Next has the published order of heads,
and its projections by part.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outpace.checkpoints.families.gguf_format import Order
from outpace.models.config import ModelConfig
from outpace.models.delta_layers import DeltaLayers

DELTA = "linear_attn."


def delta_layers(config: ModelConfig) -> DeltaLayers:
    """Return the gated delta layers of a model that has some."""
    assert config.delta is not None
    return config.delta


def spread_heads(config: ModelConfig, count: int) -> Tensor:
    """Return the places of all value heads; `count` is the size of them together."""
    delta = delta_layers(config)
    places = torch.arange(count).view(-1, delta.key_heads, count // delta.value_heads)
    return places.transpose(0, 1).flatten()


def spread_values(config: ModelConfig, count: int) -> Tensor:
    """Return the places of queries, keys and values, of which only values are spread."""
    before = 2 * delta_layers(config).key_size
    return torch.cat((torch.arange(before), before + spread_heads(config, count - before)))


def group_parts(config: ModelConfig, count: int) -> Tensor:
    """Return the places of queries, keys, values and gates that are published by key head."""
    delta = delta_layers(config)
    parts = torch.arange(count).split([delta.key_size] * 2 + [delta.value_size] * 2)
    return torch.cat([part.view(delta.key_heads, -1) for part in parts], 1).flatten()


def part_rows(config: ModelConfig) -> tuple[int, ...]:
    """Return the rows of queries, keys and values together, and those of gates."""
    return delta_layers(config).mixed_size, delta_layers(config).value_size


SPREAD_ROWS: Mapping[str, Order] = {
    **{f"{DELTA}{name}.weight": spread_values for name in ("in_proj_qkv", "conv1d")},
    **{f"{DELTA}in_proj_{part}.weight": spread_heads for part in "zba"},
    **{f"{DELTA}{name}": spread_heads for name in ("A_log", "dt_bias")},
}
SPREAD_COLUMNS: Mapping[str, Order] = {f"{DELTA}out_proj.weight": spread_heads}
