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
from outpace.checkpoints.gguf.config import ROPE_FACTORS
from outpace.checkpoints.gguf.file import GGUFFile, import_gguf
from outpace.checkpoints.piece import TensorPart
from outpace.checkpoints.weights import CheckpointWeights
from outpace.kernels.packed import INPUT_MULTIPLES, FormatRows, PackedMatrix, pack_matrix
from outpace.models.config import ModelConfig
from outpace.models.int8 import quantize_weight
from outpace.models.split import ShardIndex


class GGUFWeights(CheckpointWeights):
    """The tensors of one GGUF file, dequantized on demand."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.folder, self.scheme, self.file, self.config = file.path, None, file, config
        self.unpacked: dict[str, list[str]] = {}
        self.family = FAMILIES[config.family]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.file.size

    @cached_property
    def name_map(self) -> Any:
        """The library's map from published to GGUF names."""
        gguf = import_gguf()
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        return gguf.get_tensor_name_map(kinds[self.family.gguf], self.config.layers)

    def gguf_name(self, name: str) -> tuple[str, int | None]:
        """Return the GGUF name of a published tensor, and its index in a stack of experts."""
        stem, _, kind = name.rpartition(".")
        found = self.name_map.get_name(stem)
        if found is not None:
            return f"{found}.{kind}", None
        before, inside, rest = stem.partition(".experts.")
        number, _, part = rest.partition(".")
        found = self.name_map.get_name(f"{before}.experts.{part}") if inside else None
        return f"{found or stem}.{kind}", int(number) if found else None

    def __contains__(self, name: str) -> bool:
        return self.gguf_name(name)[0] in self.file.tensors

    def find_tensor(self, name: str) -> tuple[Path, Any]:
        """Return the file that has a tensor; raise `ValueError` if there is none."""
        if name not in self:
            raise ValueError(f"{self.folder}: no tensor {self.gguf_name(name)[0]!r} in its weights")
        return self.folder, None

    def read_tensor(self, name: str, shape: tuple[int, ...], index: ShardIndex = ()) -> Tensor:
        """Read a dequantized tensor, or the slice at `index`.

        Raises:
            ValueError: If it has another shape, or a type that cannot be read.
        """
        plain = self.file.read_tensor(*self.find_entry(name, shape))
        return self.reorder_heads(name, plain)[index]

    def read_codes(
        self, name: str, shape: tuple[int, ...], *, rounded: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Quantize a matrix to codes `i8[out, in]` and scales `f32[out]`.

        Only a chunk at a time is in float32. Returns None unless `rounded` is set, since the
        file's own blocks are more precise.
        """
        if not rounded:
            return None
        pieces = map(quantize_weight, self.file.read_chunks(*self.find_entry(name, shape)))
        codes, scale = map(torch.cat, zip(*pieces, strict=True))
        if not is_finite(scale):
            raise not_finite_error(self.folder, name, torch.float32)
        return self.reorder_heads(name, codes), self.reorder_heads(name, scale)

    @property
    def has_packed(self) -> bool:
        """Whether matrices may be stored in a format that `read_packed` reads."""
        return True

    def read_packed(self, pieces: Sequence[TensorPart]) -> PackedMatrix | None:
        """Pack a matrix of several tensors in the file's block formats.

        Returns None for a format without a compiled loop.

        Raises:
            ValueError: For a tensor of another shape, or with scales that are not finite.
        """
        inputs = pieces[0].shape[-1]
        entries = [self.find_entry(piece.source, piece.shape) for piece in pieces]
        kinds = [self.file.tensors[name].kind.value for name, _ in entries]
        if any(kind not in INPUT_MULTIPLES or inputs % INPUT_MULTIPLES[kind] for kind in kinds):
            return None
        contents = [self.file.map_rows(*entry) for entry in entries]
        parts = [
            FormatRows(kind, self.row_addresses(piece.source, content))
            for piece, kind, content in zip(pieces, kinds, contents, strict=True)
        ]
        if (matrix := pack_matrix(parts, inputs)) is not None:
            return matrix
        for piece, part in zip(pieces, parts, strict=True):
            if pack_matrix([part], inputs) is None:
                raise not_finite_error(self.folder, piece.source, torch.float32)
        raise AssertionError("a matrix is not finite, and each of its parts is")

    def row_addresses(self, name: str, content: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """Return the addresses of a tensor's rows `u8[rows, bytes]`, in the model's order."""
        order = self.reorder_heads(name, torch.arange(len(content))).numpy().astype(np.uint64)
        return order * np.uint64(content.strides[0]) + np.uint64(content.ctypes.data)

    def find_entry(self, name: str, shape: tuple[int, ...]) -> tuple[str, int | None]:
        """Return a tensor's GGUF name and stack index after checking its shape."""
        self.find_tensor(name)
        own, number = self.gguf_name(name)
        wanted = shape if number is None else (self.config.experts, *shape)
        if (found := self.file.tensors[own].shape) != wanted:
            raise ValueError(
                f"{self.folder}: tensor {own!r} has shape {found}, but its metadata need {wanted}"
            )
        return own, number

    def reorder_heads(self, name: str, rows: Tensor) -> Tensor:
        """Return rows in the model's order; files may pair those of queries and keys."""
        if self.family.gguf_pairs and name.endswith(self.family.gguf_pairs):
            return unpair_heads(rows, self.config.head_dim)
        return rows

    def check_names(self, config: ModelConfig, wanted: Collection[str]) -> None:
        """Raise `ValueError` for tensors that the model does not use."""
        unused = (
            set(self.file.tensors) - {self.gguf_name(name)[0] for name in wanted} - {ROPE_FACTORS}
        )
        if unused:
            names = ", ".join(repr(name) for name in sorted(unused)[:3])
            raise ValueError(
                f"{self.folder}: {len(unused)} of its tensors are not of the model that its "
                f"metadata describe, such as {names}; supported: {self.family.about}"
            )


def unpair_heads(rows: Tensor, size: int) -> Tensor:
    """Reorder rows of queries or keys from interleaved pairs to halves of a head.

    Rotary embedding rotates the two rows of a pair; only their places differ.
    """
    return rows.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).reshape(rows.shape)
