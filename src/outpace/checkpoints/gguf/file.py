"""GGUF files: metadata, and tensors dequantized on demand; needs the extra `gguf`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from stat import S_ISREG
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.checkpoints.fields import error_line, shorten
from outpace.checkpoints.gguf.header import GGUFHeader, TensorInfo, read_header
from outpace.checkpoints.name import GGUF_SUFFIX
from outpace.kernels.packed import (
    INPUT_MULTIPLES,
    FormatRows,
    dequantize_packed,
    find_packed_loop,
    pack_matrix,
)

PART_NAME = re.compile(rf"(?P<name>.+)-\d{{5}}-of-(?P<count>\d{{5}}){re.escape(GGUF_SUFFIX)}")
PART_COUNT, PART_NUMBER, PART_TENSORS = "split.count", "split.no", "split.tensors.count"

CHUNK_NUMBERS = 2**18
"""Numbers dequantized at a time: they and their source bytes fit into a CPU cache."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its file, type, shape `[out, in]`, offset and size in bytes."""

    path: Path
    kind: Any
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class GGUFFile:
    """Metadata and tensors of a file, or of all its parts, by name."""

    path: Path
    size: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def read_chunks(self, name: str, part: int | None = None) -> Iterator[Tensor]:
        """Yield chunks of rows `f32[n, in]` of a tensor.

        Args:
            name: Name of the tensor in the file.
            part: Index along the first dimension of a stack, or None for all.

        Raises:
            ValueError: For a type that cannot be read.
        """
        gguf, entry = import_gguf(), self.tensors[name]
        shape, size, offset = entry.shape, entry.size, entry.offset
        if part is not None:
            shape, size = shape[1:], size // shape[0]
            offset += part * size
        width, rows = shape[-1], prod(shape[:-1])
        step = max(CHUNK_NUMBERS // max(width, 1), 1)
        row = size // max(rows, 1)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            # Read instead of mapped: mapped pages stay in memory until the map is closed.
            content = np.fromfile(entry.path, np.uint8, count * row, offset=offset + first * row)
            blocks = content.reshape(count, row)
            if (dequantized_rows := dequantize_rows(entry.kind.value, blocks, width)) is not None:
                yield dequantized_rows
                continue
            try:
                # As one row, since the library loops over blocks of sixteen rows in Python.
                with np.errstate(all="ignore"):  # the caller rejects NaN and infinity
                    numbers = gguf.quants.dequantize(content[None], entry.kind)
                numbers = numbers.reshape(count, width).astype(np.float32, copy=False)
            except (NotImplementedError, ValueError) as error:
                raise ValueError(
                    f"{entry.path}: tensor {name!r} is of type {entry.kind.name}, which cannot be "
                    f"read ({error_line(error)})"
                ) from error
            yield torch.from_numpy(numbers)

    def read_integers(self, name: str) -> Tensor:
        """Read the integers `i64[n]` of a tensor.

        Raises:
            ValueError: If the file has no such tensor, or it is of another type.
        """
        entry = self.tensors.get(name)
        if entry is None or entry.kind.name != "I64" or len(entry.shape) != 1:
            raise ValueError(f"{self.path}: tensor {name!r} must be a list of 64-bit integers")
        return torch.from_numpy(
            np.fromfile(entry.path, np.int64, entry.shape[0], offset=entry.offset)
        )

    def map_rows(self, name: str, part: int | None = None) -> NDArray[np.uint8]:
        """Map the bytes `u8[rows, bytes]` of a tensor's rows.

        Args:
            name: Name of the tensor in the file.
            part: Index along the first dimension of a stack, or None for all.

        Raises:
            ValueError: If the file has become shorter.
        """
        entry = self.tensors[name]
        shape, size, offset = entry.shape, entry.size, entry.offset
        if part is not None:
            shape, size = shape[1:], size // shape[0]
            offset += part * size
        try:
            mapped = np.memmap(entry.path, np.uint8, "r", offset, (size,))
        except (OSError, ValueError) as error:
            raise ValueError(f"{entry.path} has changed: {error_line(error)}") from error
        return mapped.reshape(prod(shape[:-1]), -1)

    def read_tensor(self, name: str, part: int | None = None) -> Tensor:
        """Return a dequantized tensor `f32[out, in]`, or one `part` of a stack."""
        shape = self.tensors[name].shape[0 if part is None else 1 :]
        whole, first = torch.empty(prod(shape[:-1]), shape[-1]), 0
        for piece in self.read_chunks(name, part):
            whole[first : first + len(piece)] = piece
            first += len(piece)
        return whole.view(shape)


def dequantize_rows(kind: int, rows: NDArray[np.uint8], width: int) -> Tensor | None:
    """Dequantize rows to `f32[n, in]` with the compiled loop.

    Returns None without a loop for this type, or for an infinite scale.
    """
    if not find_packed_loop() or kind not in INPUT_MULTIPLES:
        return None
    starts = np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.strides[0])
    matrix = pack_matrix([FormatRows(kind, starts + np.uint64(rows.ctypes.data))], width)
    return None if matrix is None else dequantize_packed(matrix)


def import_gguf() -> ModuleType:
    """Import the library `gguf`.

    Raises:
        ValueError: If it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ValueError("GGUF files need the extra: pip install 'outpace[gguf]'") from error
    module: ModuleType = gguf
    return module


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file."""
    return path.suffix == GGUF_SUFFIX and not path.is_dir()


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file, or all parts of the file that any of them belongs to.

    Raises:
        ValueError: If it is truncated or of another format, or if a part is missing.
    """
    file = open_part(path)
    count = file.metadata.get(PART_COUNT)
    if type(count) is not int or count < 2:
        return file
    parts = [open_part(part) for part in part_paths(path, count)]
    tensors: dict[str, TensorEntry] = {}
    for number, part in enumerate(parts):
        if (part.metadata.get(PART_COUNT), part.metadata.get(PART_NUMBER)) != (count, number):
            raise ValueError(f"{part.path} is not part {number + 1} of {count}, against its name")
        if twice := tensors.keys() & part.tensors.keys():
            raise ValueError(f"{part.path}: tensor {min(twice)!r} is in another part as well")
        tensors |= part.tensors
    first = parts[0]
    if first.metadata.get(PART_TENSORS, len(tensors)) != len(tensors):
        wanted = shorten(first.metadata[PART_TENSORS])
        raise ValueError(f"{first.path}: its parts have {len(tensors)} tensors, not {wanted}")
    return replace(first, size=sum(part.size for part in parts), tensors=tensors)


def part_paths(path: Path, count: int) -> list[Path]:
    """Return the parts of a file; raise `ValueError` for a missing one."""
    found = PART_NAME.fullmatch(path.name)
    if found is None or int(found["count"]) != count:
        raise ValueError(
            f"{path} is one of {count} parts: it must be named as they are, "
            f"NAME-00001-of-{count:05}{GGUF_SUFFIX}"
        )
    paths = [
        path.with_name(f"{found['name']}-{number:05}-of-{count:05}{GGUF_SUFFIX}")
        for number in range(1, count + 1)
    ]
    missing = next((part.name for part in paths if not part.is_file()), None)
    if missing is not None:
        raise ValueError(f"{path} is one of {count} parts, and {missing} is missing")
    return paths


def open_part(path: Path) -> GGUFFile:
    """Open one GGUF file without its other parts."""
    try:
        stat = path.stat()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not S_ISREG(stat.st_mode):
        raise ValueError(f"{path} is not a regular file: give a GGUF file")
    return parse_gguf(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def parse_gguf(path: Path, changed: int, size: int) -> GGUFFile:
    """Parse a file once per modification: configuration, tokenizer and weights all need it."""
    gguf = import_gguf()
    try:
        header = read_header(path)
        tensors = {
            name: tensor_entry(gguf, path, name, info, header, size)
            for name, info in header.tensors.items()
        }
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error_line(error)}") from error
    return GGUFFile(path, size, header.metadata, tensors)


def tensor_entry(
    gguf: ModuleType, path: Path, name: str, info: TensorInfo, header: GGUFHeader, size: int
) -> TensorEntry:
    """Locate a tensor in a file of `size` bytes.

    Raises:
        ValueError: If its type is unknown or its bytes exceed the file.
    """
    try:
        kind = gguf.GGMLQuantizationType(info.kind)
    except ValueError:
        raise ValueError(f"tensor {name!r} is of type {info.kind}, which is unknown") from None
    numbers, octets = gguf.GGML_QUANT_SIZES[kind]
    if info.sizes[0] % numbers:
        raise ValueError(
            f"tensor {name!r} has rows of {info.sizes[0]}, and {kind.name} has blocks of {numbers}"
        )
    wanted, begin = prod(info.sizes) // numbers * octets, header.begin + info.offset
    if begin + wanted > size:
        raise ValueError(
            f"it is truncated: tensor {name!r} ends at byte {begin + wanted} of {size}"
        )
    return TensorEntry(path, kind, info.sizes[::-1], begin, wanted)
