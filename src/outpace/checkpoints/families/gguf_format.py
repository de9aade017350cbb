"""How llama.cpp writes a family into GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
