"""The tensors of a GGUF file, by their published names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.fill import is_finite, not_finite_error
from outpace.checkpoints.gguf.config import ROPE_FACTORS, gguf_format
from outpace.checkpoints.gguf.file import GGUFFile, import_gguf
from outpace.checkpoints.piece import TensorPart
from outpace.checkpoints.stacks import StackEntry, stored_name
from outpace.checkpoints.weights import CheckpointWeights
from outpace.kernels.packed import (
    INPUT_MULTIPLES,
    FormatRows,
    PackedMatrix,
    RowAddresses,
    pack_matrix,
)
from outpace.models.config import ModelConfig
from outpace.models.int8 import quantize_weight
from outpace.models.split import ShardIndex

VOCABULARY_IDS = "d2t"
"""Tensor of the target's ids of a draft's vocabulary; published checkpoints have offsets there."""

NORM_SUFFIX = "norm.weight"
"""End of the names of norms, which some formats shift."""


class GGUFWeights(CheckpointWeights):
    """The tensors of one GGUF file, dequantized on demand."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.folder, self.scheme, self.file, self.config = file.path, None, file, config
        self.unpacked: dict[str, list[str]] = {}
        self.family = FAMILIES[config.family]
        self.format = gguf_format(self.family)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.file.size

    @cached_property
    def name_map(self) -> Any:
        """The library's map from published to GGUF names."""
        gguf = import_gguf()
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        architecture = self.format.named_like or self.format.architecture
        return gguf.get_tensor_name_map(kinds[architecture], self.config.layers)

    def gguf_names(self, name: str) -> list[tuple[str, int | None]]:
        """Return the GGUF tensors of a published one, whose rows alternate if there are several.

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

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and all(
            own in self.file.tensors for own, _ in self.gguf_names(name)
        )

    def find_tensor(self, name: str) -> tuple[Path, Any]:
        """Return the file that has a tensor; raise `ValueError` if there is none."""
        for own, _ in self.gguf_names(name):
            if own not in self.file.tensors:
                raise ValueError(f"{self.folder}: no tensor {own!r} in its weights")
        return self.folder, None

    def read_tensor(self, name: str, shape: tuple[int, ...], index: ShardIndex = ()) -> Tensor:
        """Read a dequantized tensor, or the slice at `index`.

        Raises:
            ValueError: If it has another shape, or a type that cannot be read.
        """
        plain = alternate_rows(
            [self.file.read_tensor(*entry) for entry in self.find_entries(name, shape)]
        )
        if self.format.norm_offset and name.endswith(NORM_SUFFIX):
            plain = plain - self.format.norm_offset
        return self.reorder_heads(name, plain)[index]

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
        found = []
        for entry in self.find_entries(name, shape):
            pieces = map(quantize_weight, self.file.read_chunks(*entry))
            found.append(tuple(map(torch.cat, zip(*pieces, strict=True))))
        codes, scale = map(alternate_rows, zip(*found, strict=True))
        if not is_finite(scale):
            raise not_finite_error(self.folder, name, torch.float32)
        return self.reorder_heads(name, codes), self.reorder_heads(name, scale)

    @property
    def has_packed(self) -> bool:
        """Whether matrices may be stored in a format that `read_packed` reads."""
        return True

    def read_packed(self, pieces: Sequence[TensorPart]) -> PackedMatrix | None:
        """Pack a matrix of several tensors in the file's block formats.

        Returns None for a format without a compiled loop, and for rows that alternate between
        formats.

        Raises:
            ValueError: For a tensor of another shape, or with scales that are not finite.
        """
        inputs = pieces[0].shape[-1]
        groups = [self.find_entries(piece.source, piece.shape) for piece in pieces]
        kinds = [{self.file.tensors[name].kind.value for name, _ in group} for group in groups]
        if any(len(group) > 1 for group in kinds):
            return None
        formats = [next(iter(group)) for group in kinds]
        if any(kind not in INPUT_MULTIPLES or inputs % INPUT_MULTIPLES[kind] for kind in formats):
            return None
        contents = [[self.file.map_rows(*entry) for entry in group] for group in groups]
        parts = [
            FormatRows(kind, self.row_addresses(piece.source, content))
            for piece, kind, content in zip(pieces, formats, contents, strict=True)
        ]
        if (matrix := pack_matrix(parts, inputs)) is not None:
            return matrix
        for piece, part in zip(pieces, parts, strict=True):
            if pack_matrix([part], inputs) is None:
                raise not_finite_error(self.folder, piece.source, torch.float32)
        raise AssertionError("a matrix is not finite, and each of its parts is")

    def row_addresses(self, name: str, contents: Sequence[NDArray[np.uint8]]) -> RowAddresses:
        """Return the addresses of the rows `u8[rows, bytes]` of a tensor, in the model's order."""
        starts = [
            np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.strides[0])
            + np.uint64(rows.ctypes.data)
            for rows in contents
        ]
        addresses = np.stack(starts, 1).reshape(-1)
        return addresses[self.reorder_heads(name, torch.arange(len(addresses))).numpy()]

    def find_entries(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, int | None]]:
        """Return a tensor's GGUF names and stack indices after checking their shapes."""
        self.find_tensor(name)
        entries = self.gguf_names(name)
        for own, number in entries:
            each = (shape[0] // len(entries), *shape[1:])
            wanted = each if number is None else (self.config.experts, *each)
            if (found := self.file.tensors[own].shape) != wanted:
                raise ValueError(
                    f"{self.folder}: tensor {own!r} has shape {found}, but its metadata need "
                    f"{wanted}"
                )
        return entries

    def reorder_heads(self, name: str, rows: Tensor) -> Tensor:
        """Return rows in the model's order; files may pair those of queries and keys."""
        if self.format.pairs and name.endswith(self.format.pairs):
            return unpair_heads(rows, self.config.head_dim)
        return rows

    def check_names(self, config: ModelConfig, wanted: Collection[str]) -> None:
        """Raise `ValueError` for tensors that the model does not use."""
        used = {own for name in wanted for own, _ in self.gguf_names(name)}
        unused = set(self.file.tensors) - used - {ROPE_FACTORS}
        if unused:
            names = ", ".join(repr(name) for name in sorted(unused)[:3])
            raise ValueError(
                f"{self.folder}: {len(unused)} of its tensors are not of the model that its "
                f"metadata describe, such as {names}; supported: {self.family.about}"
            )


def alternate_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of several tensors in turn."""
    return parts[0] if len(parts) == 1 else torch.stack([*parts], 1).flatten(0, 1)


def unpair_heads(rows: Tensor, size: int) -> Tensor:
    """Reorder rows of queries or keys from interleaved pairs to halves of a head.

    Rotary embedding rotates the two rows of a pair; only their places differ.
    """
    return rows.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).reshape(rows.shape)
