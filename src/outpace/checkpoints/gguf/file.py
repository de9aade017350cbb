"""GGUF files: metadata, and tensors dequantized on demand; needs the extra `gguf`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from stat import S_ISREG
from struct import Struct
from struct import error as StructError
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.checkpoints.fields import error_line, index, parse_value, shorten
from outpace.checkpoints.name import GGUF_SUFFIX
from outpace.errors import install_extra
from outpace.kernels.packed import (
    INPUT_MULTIPLES,
    FormatRows,
    dequantize_packed,
    find_packed_loop,
    pack_matrix,
    row_addresses,
)

GGUF_MAGIC, GGUF_VERSIONS = b"GGUF", (2, 3)
MAX_HEADER_ENTRIES, MAX_ELEMENTS = 2**16, 2**22
"""Limits on the fields and on the tensors of a file, and on the elements of all its arrays."""

MAX_STRING_BYTES, MAX_NAME_BYTES, MAX_DIMENSIONS = 2**24, 2**10, 4
"""Limits on the bytes of a string and of a name, and on the dimensions of a tensor."""

DEFAULT_ALIGNMENT = 32
"""Alignment of tensor offsets in bytes without `general.alignment`."""

STRING_TYPE, ARRAY_TYPE = 8, 9
NUMBER_FORMATS = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
NUMBER_TYPES = {kind: np.dtype(form) for kind, form in enumerate(NUMBER_FORMATS) if form}
"""NumPy types by the type number in the file."""

LENGTH_FORMAT = Struct("<Q")
ARCHITECTURE, TOKENIZER_MODEL = "general.architecture", "tokenizer.ggml.model"


@dataclass(frozen=True)
class MetadataArray:
    """A metadata array whose elements are read from the file on demand."""

    path: Path
    kind: int
    count: int
    offset: int
    size: int

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        kind = "string" if self.kind == STRING_TYPE else NUMBER_TYPES[self.kind].name
        return f"{self.count} of type {kind}"

    def holds_type(self, kind: type) -> bool:
        """Return whether the elements become this Python type."""
        return kind is (
            str if self.kind == STRING_TYPE else type(NUMBER_TYPES[self.kind].type().item())
        )

    def read_bytes(self) -> bytes:
        """Read the bytes of all elements.

        Raises:
            ValueError: If the file has become shorter.
        """
        with self.path.open("rb") as file:
            file.seek(self.offset)
            found = file.read(self.size)
        if len(found) != self.size:
            raise ValueError("the file has changed")
        return found

    def read_values(self) -> list[Any]:
        """Read the strings or numbers.

        Raises:
            ValueError: For bytes that are not UTF-8.
        """
        content = self.read_bytes()
        if self.kind != STRING_TYPE:
            found: list[Any] = np.frombuffer(content, NUMBER_TYPES[self.kind]).tolist()
            return found
        return [
            content[begin:end].decode() for begin, end in iterate_strings(content, 0, self.count)
        ]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's header entry: type, sizes in file order, and the offset of its bytes."""

    kind: int
    sizes: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata and tensors by name; offsets of tensors count from `begin`."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    begin: int


def read_header(path: Path) -> GGUFHeader:
    with path.open("rb") as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ValueError("it does not begin with GGUF")
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            return HeaderReader(path, content).read_all()


class HeaderReader:
    """Sequential reader of a header."""

    def __init__(self, path: Path, content: mmap) -> None:
        self.path, self.content = path, content
        self.end, self.position, self.elements = len(content), len(GGUF_MAGIC), 0

    def read_all(self) -> GGUFHeader:
        check_gguf_version(self.read_integer(4))
        tensors = self.read_count("tensors")
        fields = self.read_count("fields")
        metadata = {
            name: self.read_value(name, self.read_integer(4)) for name in self.read_names(fields)
        }
        infos = {name: self.read_info(name) for name in self.read_names(tensors)}
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment must be a power of two, got {shorten(alignment)}")
        begin = -(-self.position // alignment) * alignment
        for name, info in infos.items():
            if info.offset % alignment:
                raise ValueError(
                    f"tensor {name!r} begins at byte {info.offset}, which is not a multiple of "
                    f"{alignment}"
                )
        return GGUFHeader(metadata, infos, begin)

    def take_bytes(self, size: int) -> int:
        """Advance by `size` bytes and return where they begin."""
        begin, self.position = self.position, self.position + size
        if self.position > self.end:
            raise ValueError(
                f"it is truncated: {size} bytes should follow byte {begin} of {self.end}"
            )
        return begin

    def read_integer(self, size: int) -> int:
        begin = self.take_bytes(size)
        return int.from_bytes(self.content[begin : self.position], "little")

    def read_count(self, what: str) -> int:
        if (count := self.read_integer(LENGTH_FORMAT.size)) > MAX_HEADER_ENTRIES:
            raise ValueError(f"it has {count} {what}; at most {MAX_HEADER_ENTRIES} are read")
        return count

    def read_string(self, longest: int = MAX_STRING_BYTES) -> str:
        if (size := self.read_integer(LENGTH_FORMAT.size)) > longest:
            raise ValueError(
                f"the string after byte {self.position} has {size} bytes; at most "
                f"{longest} are read"
            )
        begin = self.take_bytes(size)
        return self.content[begin : self.position].decode()

    def read_names(self, count: int) -> Iterator[str]:
        """Yield the distinct names of `count` entries; the caller reads each entry in between."""
        seen: set[str] = set()
        for _ in range(count):
            name = self.read_string(MAX_NAME_BYTES)
            if not name.isprintable():
                raise ValueError(f"an entry has the name {shorten(name)}, which cannot be printed")
            if name in seen:
                raise ValueError(f"two entries have the name {shorten(name)}")
            seen.add(name)
            yield name

    def read_value(self, name: str, kind: int) -> Any:
        """Read a value: a string, a number, a boolean or a `MetadataArray`."""
        if kind == STRING_TYPE:
            try:
                return self.read_string()
            except UnicodeDecodeError as error:
                raise ValueError(f"{name} must be UTF-8: {error}") from None
        if kind == ARRAY_TYPE:
            return self.read_array(name)
        if kind not in NUMBER_TYPES:
            raise ValueError(f"{name} is of type {kind}, which is unknown")
        begin = self.take_bytes(NUMBER_TYPES[kind].itemsize)
        return np.frombuffer(self.content[begin : self.position], NUMBER_TYPES[kind])[0].item()

    def read_array(self, name: str) -> MetadataArray:
        kind, count = self.read_integer(4), self.read_integer(LENGTH_FORMAT.size)
        if kind != STRING_TYPE and kind not in NUMBER_TYPES:
            raise ValueError(f"{name} is an array of type {kind}, which is not supported")
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            raise ValueError(
                f"{name} is an array of {count}; at most {MAX_ELEMENTS} are read of all arrays"
            )
        begin = self.position
        if kind == STRING_TYPE:
            for _, end in iterate_strings(self.content, begin, count):
                self.position = end
        else:
            self.take_bytes(count * NUMBER_TYPES[kind].itemsize)
        return MetadataArray(self.path, kind, count, begin, self.position - begin)

    def read_info(self, name: str) -> TensorInfo:
        if not 1 <= (count := self.read_integer(4)) <= MAX_DIMENSIONS:
            raise ValueError(
                f"tensor {name!r} has {count} dimensions; 1 to {MAX_DIMENSIONS} are read"
            )
        sizes = tuple(self.read_integer(LENGTH_FORMAT.size) for _ in range(count))
        if not all(sizes):
            raise ValueError(f"tensor {name!r} has sizes {sizes}; each must be at least 1")
        return TensorInfo(
            kind=self.read_integer(4), sizes=sizes, offset=self.read_integer(LENGTH_FORMAT.size)
        )


def check_gguf_version(version: int) -> None:
    if version in GGUF_VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in GGUF_VERSIONS:
        raise ValueError(
            "it is big-endian, and only little-endian files are supported: convert it again"
        )
    known = " and ".join(map(str, GGUF_VERSIONS))
    raise ValueError(f"it is of version {version}; supported: {known}")


def iterate_strings(content: bytes | mmap, at: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each of `count` consecutive strings."""
    size_at, end, wide = LENGTH_FORMAT.unpack_from, len(content), LENGTH_FORMAT.size
    for _ in range(count):
        try:
            (size,) = size_at(content, at)
        except StructError:
            size = MAX_STRING_BYTES + 1
        begin = at + wide
        at = begin + size
        if at > end or size > MAX_STRING_BYTES:
            raise ValueError(
                f"it is truncated, or a length before byte {begin} is wrong: it has {end} bytes"
            )
        yield begin, at


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
    matrix = pack_matrix([FormatRows(kind, row_addresses(rows))], width)
    return None if matrix is None else dequantize_packed(matrix)


def import_gguf() -> ModuleType:
    """Import the library `gguf`.

    Raises:
        ValueError: If it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"{error}; a GGUF file {install_extra('gguf')}") from error
    module: ModuleType = gguf
    return module


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file, or all parts of the file that any of them belongs to.

    Raises:
        ValueError: If it is truncated or of another format, or if a part is missing.
    """
    file = open_part(path)
    try:
        count = parse_value(PART_COUNT, file.metadata.get(PART_COUNT, 0), index)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if count < 2:
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
    try:
        stat = path.stat()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not S_ISREG(stat.st_mode):
        raise ValueError(f"{path} is not a regular file: give a GGUF file")
    return parse_gguf(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def parse_gguf(path: Path, changed: int, size: int) -> GGUFFile:
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
    """Locate a tensor in a file of `size` bytes."""
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
