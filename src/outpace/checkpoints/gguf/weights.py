"""The tensors of a GGUF file, by their published names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.checkpoints.fill import is_finite, not_finite_error
from outpace.checkpoints.gguf.config import (
    ROPE_FACTORS,
    SHAPE_METADATA,
    family_of_file,
    full_name,
    gguf_format,
    predicting_layers,
)
from outpace.checkpoints.gguf.file import GGUFFile, import_gguf
from outpace.checkpoints.stacks import StackEntry, stored_name
from outpace.checkpoints.weights import CheckpointWeights, TensorPart
from outpace.kernels.packed import (
    INPUT_MULTIPLES,
    FormatRows,
    PackedMatrix,
    RowAddresses,
    pack_matrix,
    row_addresses,
)
from outpace.models.config import ModelConfig
from outpace.models.int8 import quantize_weight
from outpace.models.split import ShardIndex

VOCABULARY_IDS = "d2t"
"""Tensor of the target's ids of a draft's vocabulary; published checkpoints have offsets there."""

Entry = TypeVar("Entry")


class GGUFWeights(CheckpointWeights):
    """The tensors of one GGUF file, dequantized on demand."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.folder, self.scheme, self.file, self.config = file.path, None, file, config
        self.unpacked: dict[str, list[str]] = {}
        self.family = family_of_file(file)  # an adapter may change that of the model
        self.format = gguf_format(self.family)

    @property
    def size(self) -> int:
        return self.file.size

    @cached_property
    def name_map(self) -> Any:
        gguf = import_gguf()
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        architecture = self.format.named_like or self.format.architecture
        return gguf.get_tensor_name_map(kinds[architecture], self.config.layers)

    def gguf_names(self, name: str) -> list[tuple[str, int | None]]:
        """Return the GGUF tensors of a published one, which has the rows of all.

        Each has an index if it is a stack of experts.
        """
        entry, own = StackEntry.from_name(name), stored_name(name)
        number = None if entry is None else entry.number
        for end, others in self.format.tensors.items():
            if own.endswith(end):
                before = own.removesuffix(end)
                return [(self.map_name(before + other)[0], number) for other in others]
        mapped, expert = self.map_name(own)
        return [(mapped, number if expert is None else expert)]

    def map_name(self, name: str) -> tuple[str, int | None]:
        """Return the GGUF name of a published tensor, and its index in a stack of experts."""
        for prefix, other in self.format.prefixes.items():
            if name.startswith(prefix):
                name = other + name.removeprefix(prefix)
        if (whole := self.name_map.get_name(name)) is not None:  # a tensor without a kind
            return whole, None
        stem, _, kind = name.rpartition(".")
        if not stem:
            return name, None
        found = self.name_map.get_name(stem)
        if found is not None:
            return f"{found}.{kind}", None
        before, inside, rest = stem.partition(".experts.")
        number, _, part = rest.partition(".")
        found = self.name_map.get_name(f"{before}.experts.{part}") if inside else None
        return f"{found or stem}.{kind}", int(number) if found else None

    @property
    def unread_layers(self) -> tuple[str, ...]:
        """Prefixes of the layers after the model's, which predict several tokens."""
        count = self.config.layers
        more = predicting_layers(self.file, self.format)
        return tuple(f"blk.{layer}." for layer in range(count, count + more))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and all(
            own in self.file.tensors for own, _ in self.gguf_names(name)
        )

    def find_tensor(self, name: str) -> tuple[Path, Any]:
        for own, _ in self.gguf_names(name):
            if own not in self.file.tensors:
                raise ValueError(f"{self.folder}: no tensor {own!r} in its weights")
        return self.folder, None

    def read_tensor(self, name: str, shape: tuple[int, ...], index: ShardIndex = ()) -> Tensor:
        """Read a dequantized tensor, or the slice at `index`.

        Raises:
            ValueError: If it has another shape, or a type that cannot be read.
        """
        entries = self.find_entries(name, shape)
        plain = torch.cat([self.file.read_tensor(*entry) for entry in entries]).view(shape)
        if (restore := find_suffix(self.format.values, name)) is not None:
            plain = restore(plain)
        return self.reorder_columns(name, self.reorder_rows(name, plain))[index]

    def read_table(self, name: str, shape: tuple[int, ...], kind: str) -> Tensor:
        """Read a draft's vocabulary table from the target's ids that the file lists.

        Raises:
            ValueError: If they are not integers below the size of the vocabulary.
        """
        ids = self.file.read_integers(VOCABULARY_IDS)
        if (
            len(ids) != self.config.draft_vocab
            or not ((ids >= 0) & (ids < self.config.vocab)).all()
        ):
            raise ValueError(
                f"{self.folder}: tensor {VOCABULARY_IDS!r} must have {self.config.draft_vocab} ids "
                f"below {self.config.vocab}"
            )
        if kind == "BOOL":
            return torch.zeros(shape, dtype=torch.bool).index_fill_(0, ids, True)
        return ids - torch.arange(len(ids))

    def read_codes(
        self, name: str, shape: tuple[int, ...], *, rounded: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Quantize a matrix to codes `i8[out, in]` and scales `f32[out]`.

        Only a chunk at a time is in float32. Returns None unless `rounded` is set, since the
        file's own blocks are more precise.
        """
        if not rounded:
            return None
        chunks = [
            quantize_weight(rows)
            for entry in self.find_entries(name, shape)
            for rows in self.file.read_chunks(*entry)
        ]
        codes, scale = map(torch.cat, zip(*chunks, strict=True))
        if not is_finite(scale):
            raise not_finite_error(self.folder, name, torch.float32)
        codes = self.reorder_columns(name, codes)
        return self.reorder_rows(name, codes), self.reorder_rows(name, scale)

    @property
    def has_packed(self) -> bool:
        return True

    def read_packed(self, pieces: Sequence[TensorPart]) -> PackedMatrix | None:
        """Pack a matrix of several tensors in the file's block formats.

        Returns None for a format without a compiled loop, and for a tensor whose rows have several
        formats.

        Raises:
            ValueError: For a tensor of another shape, or with scales that are not finite.
        """
        inputs = pieces[0].shape[-1]
        groups = [self.find_entries(piece.source, piece.shape) for piece in pieces]
        kinds = [{self.file.tensors[name].kind.value for name, _ in group} for group in groups]
        formats = [kind for group in kinds for kind in group]
        unfit = any(inputs % INPUT_MULTIPLES.get(kind, inputs + 1) for kind in formats)
        if unfit or len(formats) > len(pieces):
            return None
        contents = [[self.file.map_rows(*entry) for entry in group] for group in groups]
        parts = [
            FormatRows(kind, self.order_addresses(piece.source, content))
            for piece, kind, content in zip(pieces, formats, contents, strict=True)
        ]
        columns = self.column_order(pieces[0].source, inputs)
        order = None if columns is None else columns.argsort()
        if (matrix := pack_matrix(parts, inputs, order)) is not None:
            return matrix
        # Only after a failure is the tensor at fault searched, one by one.
        pairs = zip(pieces, parts, strict=True)
        bad = next(piece for piece, part in pairs if pack_matrix([part], inputs) is None)
        raise not_finite_error(self.folder, bad.source, torch.float32)

    def order_addresses(self, name: str, contents: Sequence[NDArray[np.uint8]]) -> RowAddresses:
        """Return the addresses of the rows `u8[rows, bytes]` of a tensor, in the model's order."""
        addresses = np.concatenate([*map(row_addresses, contents)])
        return addresses[self.reorder_rows(name, torch.arange(len(addresses))).numpy()]

    def find_entries(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, int | None]]:
        """Return a tensor's GGUF names and stack indices after checking their shapes."""
        self.find_tensor(name)
        entries = self.gguf_names(name)
        sizes = find_suffix(self.format.sizes, name)
        counts = [shape[0] // len(entries)] * len(entries) if sizes is None else sizes(self.config)
        for (own, number), count in zip(entries, counts, strict=True):
            each = (count, *shape[1:])
            wanted = each if number is None else (self.config.experts, *each)
            if drop_ones(found := self.file.tensors[own].shape) != drop_ones(wanted):
                raise ValueError(
                    f"{self.folder}: tensor {own!r} has shape {found}, but its metadata need "
                    f"{wanted}{self.missing_metadata}"
                )
        return entries

    @property
    def missing_metadata(self) -> str:
        """End of an error of shapes: the metadata that would replace a default."""
        names = [full_name(name, self.format) for name in SHAPE_METADATA]
        missing = [name for name in names if name not in self.file.metadata]
        return f", without {' and '.join(missing)}" if missing else ""

    def reorder_rows(self, name: str, rows: Tensor) -> Tensor:
        order = find_suffix(self.format.rows, stored_name(name))
        return rows if order is None else rows[order(self.config, len(rows))]

    def column_order(self, name: str, count: int) -> Tensor | None:
        """Return the places in the file of published columns; None if they are the same."""
        order = find_suffix(self.format.columns, stored_name(name))
        return None if order is None else order(self.config, count)

    def reorder_columns(self, name: str, matrix: Tensor) -> Tensor:
        order = self.column_order(name, matrix.shape[-1])
        return matrix if order is None else matrix[:, order]

    def check_names(self, config: ModelConfig, wanted: Collection[str]) -> None:
        used = {own for name in wanted for own, _ in self.gguf_names(name)}
        unused = {
            name
            for name in self.file.tensors.keys() - used - {ROPE_FACTORS}
            if not name.startswith(self.unread_layers)
        }
        if unused:
            names = ", ".join(repr(name) for name in sorted(unused)[:3])
            raise ValueError(
                f"{self.folder}: {len(unused)} of its tensors are not of the model that its "
                f"metadata describe, such as {names}; supported: {self.family.about}"
            )


def find_suffix(entries: Mapping[str, Entry], name: str) -> Entry | None:
    return next((entry for suffix, entry in entries.items() if name.endswith(suffix)), None)


def drop_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without sizes of 1, which files may leave out."""
    return tuple(size for size in shape if size != 1)
