"""What a model is, whatever its family calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding: base frequency and how it is scaled beyond the trained length.

    `float32` says that queries and keys are rotated in float32, whatever the model's dtype.
    """

    theta: float = 10_000.0
    scaling: Mapping[str, Any] | None = None
    float32: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rope:
        """Read the rotary fields of a `config.json`, in the old and in the new spelling."""
        nested = config.get("rope_parameters") or {}
        scaling = dict(config.get("rope_scaling") or nested)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        theta = config.get("rope_theta") or nested.get("rope_theta") or cls.theta
        return cls(theta=float(theta), scaling=None if kind == "default" else scaling)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and choices of one decoder, translated by its family from `config.json`.

    `shift` is 1 where row *p - 1* predicts slot *p* (every causal model, Dream) and 0 where row
    *p* does. `bidirectional` says that the model was trained to see all of its rows, `mask_id`
    is the token that stands for a hole, `source` the published configuration itself.
    """

    family: str
    architecture: str
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    max_length: int
    norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    shift: int = 1
    bidirectional: bool = False
    mask_id: int | None = None
    eos: tuple[int, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key/value heads: "
                "the first must be a multiple of the second"
            )
        if self.mask_id is not None and not 0 <= self.mask_id < self.vocab:
            raise ValueError(
                f"mask token {self.mask_id} lies outside the vocabulary of {self.vocab}"
            )
