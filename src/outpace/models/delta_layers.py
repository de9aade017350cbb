"""Sizes of gated delta layers (`models/gated_delta.py`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DeltaLayers:
    """Layers with a gated delta rule in place of attention.

    Attributes:
        layers: their indices.
        key_heads, key_dim: number of heads of queries and keys, and their size.
        value_heads, value_dim: number of heads of values, and their size.
        taps: rows that the convolution before the rule sees.
        grouped: whether rows of the projections are ordered by key head, or by part.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    grouped: bool = False

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"the number of value heads must be a multiple of {self.key_heads} key heads, got "
                f"{self.value_heads}"
            )

    @property
    def key_size(self) -> int:
        """Width of all heads of keys."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of all heads of values."""
        return self.value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """Width of queries, keys and values, which the convolution mixes."""
        return 2 * self.key_size + self.value_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state of a layer."""
        return self.value_heads, self.key_dim, self.value_dim
