"""Differences between the layers of one model, as in Gemma 4."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GlobalHeads:
    """Heads of the layers without a window, if they differ from those of the other layers.

    Attributes:
        kv_heads: number of key/value heads.
        head_dim: size of a head.
        query_factor: factor on queries in addition to 1 / sqrt(head_dim).
        keys_as_values: whether the projected keys, before norm and rotation, are also the values.
    """

    kv_heads: int
    head_dim: int
    query_factor: float
    keys_as_values: bool = False


@dataclass(frozen=True, kw_only=True)
class SharedKeys:
    """The last layers, which attend to keys and values of an earlier layer.

    That is the last layer before them with the same window.

    Attributes:
        count: number of these layers.
        mlp: width of their MLP.
    """

    count: int
    mlp: int
