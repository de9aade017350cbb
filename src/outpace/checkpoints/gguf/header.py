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

from outpace.checkpoints.fields import brief

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_ENTRIES, MOST_ELEMENTS = 2**16, 2**22
"""Limits on the fields and on the tensors of a file, and on the elements of all its arrays."""

LONGEST, LONGEST_NAME, MOST_DIMENSIONS = 2**24, 2**10, 4
"""Limits on the bytes of a string and of a name, and on the dimensions of a tensor."""

ALIGNMENT = 32
"""Alignment of tensor offsets in bytes without `general.alignment`."""

STRING, ARRAY = 8, 9
FORMS = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
NUMBERS = {kind: np.dtype(form) for kind, form in enumerate(FORMS) if form}
"""NumPy types by the type number in the file."""

SIZE = Struct("<Q")


@dataclass(frozen=True)
class Array:
    """A metadata array whose elements are read from the file on demand."""

    path: Path
    kind: int
    count: int
    offset: int
    size: int

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"{self.count} of type {self.element}"

    @property
    def element(self) -> str:
        """Name of the element type, such as `int32`."""
        return "string" if self.kind == STRING else NUMBERS[self.kind].name

    def holds(self, kind: type) -> bool:
        """Return whether the elements become this Python type."""
        return kind is (str if self.kind == STRING else type(NUMBERS[self.kind].type().item()))

    def content(self) -> bytes:
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

    def values(self) -> list[Any]:
        """Read the strings or numbers.

        Raises:
            ValueError: For bytes that are not UTF-8.
        """
        content = self.content()
        if self.kind != STRING:
            found: list[Any] = np.frombuffer(content, NUMBERS[self.kind]).tolist()
            return found
        return [content[begin:end].decode() for begin, end in strings(content, 0, self.count)]


@dataclass(frozen=True)
class Info:
    """A tensor's header entry: type, sizes in file order, and the offset of its bytes."""

    kind: int
    sizes: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Header:
    """Metadata and tensors by name; offsets of tensors count from `begin`."""

    metadata: dict[str, Any]
    tensors: dict[str, Info]
    begin: int


def read_header(path: Path) -> Header:
    """Read the header of a file.

    Raises:
        ValueError: If the file is truncated or is not a GGUF file.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            return Reader(path, content).header()


class Reader:
    """Sequential reader of a header."""

    def __init__(self, path: Path, content: mmap) -> None:
        self.path, self.content = path, content
        self.end, self.at, self.elements = len(content), len(MAGIC), 0

    def header(self) -> Header:
        """Read the whole header."""
        check_version(self.number(4))
        tensors = self.count("tensors")
        fields = self.count("fields")
        metadata = {name: self.value(name, self.number(4)) for name in self.names(fields)}
        infos = {name: self.info(name) for name in self.names(tensors)}
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment must be a power of two, got {brief(alignment)}")
        begin = -(-self.at // alignment) * alignment
        for name, info in infos.items():
            if info.offset % alignment:
                raise ValueError(
                    f"tensor {name!r} begins at byte {info.offset}, which is not a multiple of "
                    f"{alignment}"
                )
        return Header(metadata, infos, begin)

    def take(self, size: int) -> int:
        """Advance by `size` bytes and return where they begin.

        Raises:
            ValueError: If the file has fewer bytes.
        """
        begin, self.at = self.at, self.at + size
        if self.at > self.end:
            raise ValueError(
                f"it is truncated: {size} bytes should follow byte {begin} of {self.end}"
            )
        return begin

    def number(self, size: int) -> int:
        """Read an unsigned integer of `size` bytes."""
        begin = self.take(size)
        return int.from_bytes(self.content[begin : self.at], "little")

    def count(self, what: str) -> int:
        """Read a number of entries."""
        if (count := self.number(SIZE.size)) > MOST_ENTRIES:
            raise ValueError(f"it has {count} {what}; at most {MOST_ENTRIES} are read")
        return count

    def string(self, longest: int = LONGEST) -> str:
        """Read a string of at most `longest` bytes."""
        if (size := self.number(SIZE.size)) > longest:
            raise ValueError(
                f"the string after byte {self.at} has {size} bytes; at most {longest} are read"
            )
        begin = self.take(size)
        return self.content[begin : self.at].decode()

    def names(self, count: int) -> Iterator[str]:
        """Yield the distinct names of `count` entries; the caller reads each entry in between."""
        seen: set[str] = set()
        for _ in range(count):
            name = self.string(LONGEST_NAME)
            if not name.isprintable():
                raise ValueError(f"an entry has the name {brief(name)}, which cannot be printed")
            if name in seen:
                raise ValueError(f"two entries have the name {brief(name)}")
            seen.add(name)
            yield name

    def value(self, name: str, kind: int) -> Any:
        """Read a value: a string, a number, a boolean or a `MetadataArray`."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(name)
        if kind not in NUMBERS:
            raise ValueError(f"{name} is of type {kind}, which is unknown")
        begin = self.take(NUMBERS[kind].itemsize)
        return np.frombuffer(self.content[begin : self.at], NUMBERS[kind])[0].item()

    def array(self, name: str) -> Array:
        """Read an array's header and skip its elements."""
        kind, count = self.number(4), self.number(SIZE.size)
        if kind != STRING and kind not in NUMBERS:
            raise ValueError(f"{name} is an array of type {kind}, which is not supported")
        self.elements += count
        if self.elements > MOST_ELEMENTS:
            raise ValueError(
                f"{name} is an array of {count}; at most {MOST_ELEMENTS} are read of all arrays"
            )
        begin = self.at
        if kind == STRING:
            for _, end in strings(self.content, begin, count):
                self.at = end
        else:
            self.take(count * NUMBERS[kind].itemsize)
        return Array(self.path, kind, count, begin, self.at - begin)

    def info(self, name: str) -> Info:
        """Read a tensor's type, sizes and offset."""
        if not 1 <= (count := self.number(4)) <= MOST_DIMENSIONS:
            raise ValueError(
                f"tensor {name!r} has {count} dimensions; 1 to {MOST_DIMENSIONS} are read"
            )
        sizes = tuple(self.number(SIZE.size) for _ in range(count))
        if not all(sizes):
            raise ValueError(f"tensor {name!r} has sizes {sizes}; each must be at least 1")
        return Info(kind=self.number(4), sizes=sizes, offset=self.number(SIZE.size))


def check_version(version: int) -> None:
    """Raise `ValueError` for an unsupported version."""
    if version in VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise ValueError(
            "it is big-endian, and only little-endian files are supported: convert it again"
        )
    known = " and ".join(map(str, VERSIONS))
    raise ValueError(f"it is of version {version}; supported: {known}")


def strings(content: bytes | mmap, at: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each of `count` consecutive strings.

    Raises:
        ValueError: If the bytes end before the last string.
    """
    size_at, end, wide = SIZE.unpack_from, len(content), SIZE.size
    for _ in range(count):
        try:
            (size,) = size_at(content, at)
        except StructError:
            size = LONGEST + 1
        begin = at + wide
        at = begin + size
        if at > end or size > LONGEST:
            raise ValueError(
                f"it is truncated, or a length before byte {begin} is wrong: it has {end} bytes"
            )
        yield begin, at
