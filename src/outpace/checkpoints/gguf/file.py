"""What stands in a GGUF file, and the numbers of its tensors; needs the extra `gguf`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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

from outpace.checkpoints.fields import line
from outpace.checkpoints.gguf.header import Header, Info, read_header
from outpace.kernels.packed import INPUTS, Rows, dequantize, level, pack_rows

ENDING = ".gguf"
PIECE = 2**18
"""Numbers that are dequantised at a time: they and what they are made of stay in a cache."""


@dataclass(frozen=True)
class Entry:
    """One tensor: its type, its shape `[out, in]`, and where its bytes are."""

    kind: Any
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class File:
    """Metadata and tensors of a file, by their names."""

    path: Path
    size: int
    metadata: dict[str, Any]
    tensors: dict[str, Entry]

    def pieces(self, name: str, part: int | None = None) -> Iterator[Tensor]:
        """Rows `f32[some, in]` of a tensor, or of one part of several upon each other.

        Raises `ValueError` for a type that cannot be read.
        """
        gguf, entry = library(), self.tensors[name]
        shape, size, offset = entry.shape, entry.size, entry.offset
        if part is not None:
            shape, size = shape[1:], size // shape[0]
            offset += part * size
        width, rows = shape[-1], prod(shape[:-1])
        some = max(PIECE // max(width, 1), 1)
        row = size // max(rows, 1)
        for first in range(0, rows, some):
            count = min(some, rows - first)
            # Read and not mapped: pages of a map stay in memory for as long as it is open.
            content = np.fromfile(self.path, np.uint8, count * row, offset=offset + first * row)
            blocks = content.reshape(count, row)
            if (quick := dequantized(entry.kind.value, blocks, width)) is not None:
                yield quick
                continue
            try:
                # As one row, since the library goes through sixteen rows at a time.
                with np.errstate(all="ignore"):  # what is no number is refused by who reads it
                    plain = gguf.quants.dequantize(content[None], entry.kind)
                plain = plain.reshape(count, width).astype(np.float32, copy=False)
            except (NotImplementedError, ValueError) as error:
                raise ValueError(
                    f"{self.path}: tensor {name!r} is of type {entry.kind.name}, which cannot be "
                    f"read ({line(error)})"
                ) from error
            yield torch.from_numpy(plain)

    def content(self, name: str, part: int | None = None) -> NDArray[np.uint8]:
        """Bytes `u8[rows, bytes]` of a tensor's rows, mapped until they are dropped.

        Raises `ValueError` where the file has become shorter.
        """
        entry = self.tensors[name]
        shape, size, offset = entry.shape, entry.size, entry.offset
        if part is not None:
            shape, size = shape[1:], size // shape[0]
            offset += part * size
        try:
            mapped = np.memmap(self.path, np.uint8, "r", offset, (size,))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} has changed: {line(error)}") from error
        return mapped.reshape(prod(shape[:-1]), -1)

    def numbers(self, name: str, part: int | None = None) -> Tensor:
        """A tensor `f32[out, in]`, dequantised, or one part of several upon each other."""
        shape = self.tensors[name].shape[0 if part is None else 1 :]
        whole, first = torch.empty(prod(shape[:-1]), shape[-1]), 0
        for piece in self.pieces(name, part):
            whole[first : first + len(piece)] = piece
            first += len(piece)
        return whole.view(shape)


def dequantized(kind: int, rows: NDArray[np.uint8], width: int) -> Tensor | None:
    """Rows `f32[some, in]` by the compiled loop; None without one, or for an infinite scale."""
    if not level() or kind not in INPUTS:
        return None
    starts = np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.strides[0])
    matrix = pack_rows([Rows(kind, starts + np.uint64(rows.ctypes.data))], width)
    return None if matrix is None else dequantize(matrix)


def library() -> ModuleType:
    """The library that dequantises; `ValueError` where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError("GGUF files need the extra: pip install 'outpace[gguf]'") from error
    module: ModuleType = gguf
    return module


def is_gguf(path: Path) -> bool:
    """Whether this names a file of the format."""
    return path.suffix == ENDING and not path.is_dir()


def opened(path: Path) -> File:
    """What stands in a file; `ValueError` for one that is cut, foreign, or a part of several."""
    try:
        stat = path.stat()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not S_ISREG(stat.st_mode):
        raise ValueError(f"{path} is no regular file: give a GGUF file")
    return parsed(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def parsed(path: Path, changed: int, size: int) -> File:
    """The same, once for each state of a file: configuration, text and weights all ask for it."""
    gguf = library()
    try:
        header = read_header(path)
        tensors = {
            name: entry(gguf, name, info, header, size) for name, info in header.tensors.items()
        }
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no readable GGUF file: {line(error)}") from error
    parts = header.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ValueError(
            f"{path} is one of {parts} parts; merge them first, with llama-gguf-split --merge"
        )
    return File(path, size, header.metadata, tensors)


def entry(gguf: ModuleType, name: str, info: Info, header: Header, size: int) -> Entry:
    """A tensor of a file of some size; `ValueError` where its bytes cannot be there."""
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
            f"it is cut: tensor {name!r} ends at byte {begin + wanted}, and it has {size}"
        )
    return Entry(kind, info.sizes[::-1], begin, wanted)
