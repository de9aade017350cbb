"""The header of a GGUF file: metadata, and the location of each tensor.

Every length is checked against the file size before it is used. Array elements are read on demand:
a vocabulary has more than a hundred thousand strings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any

import numpy as np

from outpace.checkpoints.fields import shorten

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
        return f"{self.count} of type {self.element_type}"

    @property
    def element_type(self) -> str:
        """Name of the element type, such as `int32`."""
        return "string" if self.kind == STRING_TYPE else NUMBER_TYPES[self.kind].name

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
    """Read the header of a file.

    Raises:
        ValueError: If the file is truncated or is not a GGUF file.
    """
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
        """Read the whole header."""
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
        """Advance by `size` bytes and return where they begin.

        Raises:
            ValueError: If the file has fewer bytes.
        """
        begin, self.position = self.position, self.position + size
        if self.position > self.end:
            raise ValueError(
                f"it is truncated: {size} bytes should follow byte {begin} of {self.end}"
            )
        return begin

    def read_integer(self, size: int) -> int:
        """Read an unsigned integer of `size` bytes."""
        begin = self.take_bytes(size)
        return int.from_bytes(self.content[begin : self.position], "little")

    def read_count(self, what: str) -> int:
        """Read a number of entries."""
        if (count := self.read_integer(LENGTH_FORMAT.size)) > MAX_HEADER_ENTRIES:
            raise ValueError(f"it has {count} {what}; at most {MAX_HEADER_ENTRIES} are read")
        return count

    def read_string(self, longest: int = MAX_STRING_BYTES) -> str:
        """Read a string of at most `longest` bytes."""
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
            return self.read_string()
        if kind == ARRAY_TYPE:
            return self.read_array(name)
        if kind not in NUMBER_TYPES:
            raise ValueError(f"{name} is of type {kind}, which is unknown")
        begin = self.take_bytes(NUMBER_TYPES[kind].itemsize)
        return np.frombuffer(self.content[begin : self.position], NUMBER_TYPES[kind])[0].item()

    def read_array(self, name: str) -> MetadataArray:
        """Read an array's header and skip its elements."""
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
        """Read a tensor's type, sizes and offset."""
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
    """Raise `ValueError` for an unsupported version."""
    if version in GGUF_VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in GGUF_VERSIONS:
        raise ValueError(
            "it is big-endian, and only little-endian files are supported: convert it again"
        )
    known = " and ".join(map(str, GGUF_VERSIONS))
    raise ValueError(f"it is of version {version}; supported: {known}")


def iterate_strings(content: bytes | mmap, at: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each of `count` consecutive strings.

    Raises:
        ValueError: If the bytes end before the last string.
    """
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
