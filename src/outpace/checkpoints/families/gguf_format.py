"""How llama.cpp writes a family or a draft into GGUF files: names, and orders of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.checkpoints.fields import Fields
from outpace.models.config import ModelConfig

SLIDING_WINDOW_METADATA = "attention.sliding_window"

Order = Callable[[ModelConfig, int], Tensor]
"""Returns the places in the file of `count` published rows or columns, `i64[count]`."""


def no_fields(metadata: dict[str, Any], fields: Fields) -> Fields:
    """Return no fields: a family has only the usual metadata."""
    return {}


@dataclass(frozen=True, kw_only=True)
class GGUFFormat:
    """One architecture of llama.cpp, where its files differ from the published format.

    Metadata are named without the prefix of the architecture. A value of `stated` or `implied` may
    be a function of the translated fields, by their usual names.

    Attributes:
        architecture: `general.architecture`.
        marker: Metadata that only this family has among those of the architecture.
        renamed: Published fields by their usual names.
        stated: Metadata with only one supported value, which is the default.
        implied: Published fields without metadata, or their defaults.
        required_tokenizer: Metadata of the tokenizer whose defaults are those of other models.
        scaling: Parameters of a rotary scaling without metadata.
        derived: Removes further metadata, and returns the published fields that follow from them
            and from the translated fields.
        rows, columns: Order of the rows or columns of published tensors, by suffix of their names.
        values: Functions that restore the published values, by suffix of the tensor's name.
        tensors: Published names in the style of llama.cpp's converter, by suffix of ours. Rows of
            several tensors are concatenated.
        sizes: Number of rows of each of several tensors, by suffix, where they are not equal.
        prefixes: Beginnings of published names, with those of the converter.
        named_like: Architecture with the same names of tensors, where this one is newer than the
            library `gguf`.
    """

    architecture: str
    marker: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    stated: Fields = field(default_factory=dict)
    implied: Fields = field(default_factory=dict)
    required_tokenizer: tuple[str, ...] = ()
    scaling: Fields = field(default_factory=dict)
    derived: Callable[[dict[str, Any], Fields], Fields] = no_fields
    rows: Mapping[str, Order] = field(default_factory=dict)
    columns: Mapping[str, Order] = field(default_factory=dict)
    values: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: Mapping[str, Callable[[ModelConfig], tuple[int, ...]]] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    named_like: str | None = None


def width_per_head(fields: Fields) -> int | None:
    """Return the hidden size divided by the attention heads; None without valid ones."""
    dim, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if type(dim) is int and type(heads) is int and heads > 0:
        return dim // heads
    return None


def evaluate_fields(entries: Fields, fields: Fields) -> Fields:
    """Return entries with functions of the translated fields replaced by their values."""
    return {name: entry(fields) if callable(entry) else entry for name, entry in entries.items()}


def unpair_heads(config: ModelConfig, count: int) -> Tensor:
    """Return the places of queries or keys: the two halves of a head are interleaved.

    Rotary embedding rotates the two rows of a pair; only their places differ.
    """
    half = config.head_dim // 2
    return torch.arange(count).unflatten(0, (-1, half, 2)).transpose(1, 2).flatten()


def alternate_halves(config: ModelConfig, count: int) -> Tensor:
    """Return the places of rows that the file has as two matrices, and that alternate."""
    return torch.arange(count).unflatten(0, (2, -1)).T.flatten()


PAIRED_ROWS: Mapping[str, Order] = {
    f"{name}_proj.{kind}": unpair_heads for name in "qk" for kind in ("weight", "bias")
}
"""Tensors whose rotary dimensions llama.cpp interleaves in pairs, in Llama and its relatives."""


def subtract_one(norm: Tensor) -> Tensor:
    """Return the published weights of a norm, to which the model's code adds 1."""
    return norm - 1.0


DFLASH_GGUF = GGUFFormat(
    architecture="dflash",
    named_like="qwen3",
    implied={"use_sliding_window": lambda ours: "sliding_window" in ours},
    tensors={"hidden_norm.weight": ("enc.output_norm.weight",)},
    prefixes={"layers.": "model.layers.", "norm.": "model.norm."},
)

EAGLE_GGUF = GGUFFormat(
    architecture="eagle3",
    named_like="llama",
    rows=PAIRED_ROWS,
    tensors={
        "midlayer.hidden_norm.weight": ("blk.0.attn_norm_2.weight",),
        "input_norm.weight": ("enc.output_norm.weight",),
    },
    prefixes={"midlayer.": "model.layers.0.", "norm.": "model.norm."},
)
