"""How llama.cpp writes a family into GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outpace.checkpoints.fields import Fields

PAIRED_PROJECTIONS = tuple(f"{name}_proj.{kind}" for name in "qk" for kind in ("weight", "bias"))
"""Tensors whose rotary dimensions llama.cpp interleaves in pairs, in Llama and its relatives."""

SLIDING_WINDOW_METADATA = "attention.sliding_window"


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
        pairs: Suffixes of published tensors whose rotary dimensions are interleaved in pairs.
        tensors: Published names in the style of llama.cpp's converter, by suffix of ours. Rows of
            several tensors alternate.
        prefixes: Beginnings of published names, with those of the converter.
        named_like: Architecture with the same names of tensors, where this one is newer than the
            library `gguf`.
        norm_offset: Number that is added to the weights of norms.
    """

    architecture: str
    marker: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    stated: Fields = field(default_factory=dict)
    implied: Fields = field(default_factory=dict)
    scaling: Fields = field(default_factory=dict)
    pairs: tuple[str, ...] = ()
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    named_like: str | None = None
    norm_offset: float = 0.0


def width_per_head(fields: Fields) -> int | None:
    """Return the hidden size divided by the attention heads; None without valid ones."""
    dim, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if type(dim) is int and type(heads) is int and heads > 0:
        return dim // heads
    return None


def evaluate_fields(entries: Fields, fields: Fields) -> Fields:
    """Return entries with functions of the translated fields replaced by their values."""
    return {name: entry(fields) if callable(entry) else entry for name, entry in entries.items()}
