"""What stands in a GGUF file, and the numbers of its tensors; needs the extra `gguf`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.models.fields import line

ENDING = ".gguf"


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
    metadata: dict[str, Any]
    tensors: dict[str, Entry]

    def numbers(self, name: str, part: int | None = None) -> Tensor:
        """A tensor `f32[out, in]`, dequantised, or one part of several upon each other."""
        gguf, entry = library(), self.tensors[name]
        shape, size, first = entry.shape, entry.size, 0
        if part is not None:
            count, *rest = shape
            shape, size = tuple(rest), size // count
            first = part * size
        # Read and not mapped: pages of a map stay in memory for as long as it is open.
        octets = np.fromfile(self.path, np.uint8, size, offset=entry.offset + first)
        try:
            rows = octets.reshape(prod(shape[:-1]), -1)
            plain = gguf.quants.dequantize(rows, entry.kind)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(
                f"{self.path}: tensor {name!r} is of type {entry.kind.name}, which cannot be read "
                f"({line(error)})"
            ) from error
        found: Tensor = torch.from_numpy(plain.reshape(shape).astype(np.float32))
        return found


def library() -> ModuleType:
    """The library that knows the format; `ValueError` where it is not installed."""
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
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return parsed(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=2)
def parsed(path: Path, changed: int, size: int) -> File:
    """The same, once for each state of a file: configuration, text and weights all ask for it."""
    gguf = library()

    class Reader(gguf.GGUFReader):  # type: ignore[misc,name-defined]
        """One that ends where the file does, whatever its lengths say."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **more: Any) -> Any:
            found = super()._get(offset, dtype, count, *order, **more)
            if len(found) != count:
                raise ValueError("the file is cut, or its lengths are wrong")
            return found

    try:
        reader = Reader(path)
        if reader.byte_order != "I":
            raise ValueError("it is of the other byte order")
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {
            tensor.name: Entry(
                tensor.tensor_type,
                tuple(reversed([int(size) for size in tensor.shape])),
                int(tensor.data_offset),
                int(tensor.n_bytes),
            )
            for tensor in reader.tensors
        }
    except Exception as error:  # whatever the library makes of bytes that are none of its own
        raise ValueError(f"{path} is no readable GGUF file: {line(error)}") from error
    if metadata.get("split.count", 0) > 1:
        raise ValueError(
            f"{path} is one of {metadata['split.count']} parts; merge them first, with "
            "llama-gguf-split --merge"
        )
    return File(path, metadata, tensors)
