"""The header of a GGUF file: metadata, and where its tensors are.

Every length is checked against the file before anything is read by it, and the elements of arrays
are read when they are needed: a vocabulary has some hundred thousand strings.
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
"""Most fields, and tensors, of a file; most elements of all its arrays together."""

LONGEST, LONGEST_NAME, MOST_DIMENSIONS = 2**24, 2**10, 4
"""Most bytes of a string and of a name; most dimensions of a tensor."""

ALIGNMENT = 32
"""What offsets of tensors are multiples of, unless `general.alignment` says otherwise."""

STRING, ARRAY = 8, 9
FORMS = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
NUMBERS = {kind: np.dtype(form) for kind, form in enumerate(FORMS) if form}
"""Types of numbers, by their number in a file."""

SIZE = Struct("<Q")


@dataclass(frozen=True)
class Array:
    """The elements of an array, in a file until they are needed."""

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
        """Type of an element, such as `int32`."""
        return "string" if self.kind == STRING else NUMBERS[self.kind].name

    def holds(self, kind: type) -> bool:
        """Whether its elements are of a type of Python's."""
        return kind is (str if self.kind == STRING else type(NUMBERS[self.kind].type().item()))

    def content(self) -> bytes:
        """Bytes of all elements; `ValueError` where the file has become shorter."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            found = file.read(self.size)
        if len(found) != self.size:
            raise ValueError("the file has changed")
        return found

    def values(self) -> list[Any]:
        """Strings or numbers; `ValueError` for bytes that are not UTF-8."""
        content = self.content()
        if self.kind != STRING:
            found: list[Any] = np.frombuffer(content, NUMBERS[self.kind]).tolist()
            return found
        return [content[begin:end].decode() for begin, end in strings(content, 0, self.count)]


@dataclass(frozen=True)
class Info:
    """What a header says of a tensor: its type, sizes in order of the file, its bytes' offset."""

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
    """The header of a file. Raises `ValueError` for one that is cut, or is none."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            return Reader(path, content).header()


class Reader:
    """What a header holds, from its begin to its end."""

    def __init__(self, path: Path, content: mmap) -> None:
        self.path, self.content = path, content
        self.end, self.at, self.elements = len(content), len(MAGIC), 0

    def header(self) -> Header:
        """All of it."""
        check_version(self.number(4))
        tensors = self.count("tensors")
        fields = self.count("fields")
        metadata = {name: self.value(name, self.number(4)) for name in self.names(fields)}
        infos = {name: self.info(name) for name in self.names(tensors)}
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {brief(alignment)}, which is no power of two")
        begin = -(-self.at // alignment) * alignment
        for name, info in infos.items():
            if info.offset % alignment:
                raise ValueError(
                    f"tensor {name!r} begins at byte {info.offset}, which is no multiple of "
                    f"{alignment}"
                )
        return Header(metadata, infos, begin)

    def take(self, size: int) -> int:
        """Where the next bytes begin; `ValueError` where the file has fewer."""
        begin, self.at = self.at, self.at + size
        if self.at > self.end:
            raise ValueError(
                f"it is cut: {size} bytes were to follow byte {begin}, and it has {self.end}"
            )
        return begin

    def number(self, size: int) -> int:
        """A whole number of so many bytes."""
        begin = self.take(size)
        return int.from_bytes(self.content[begin : self.at], "little")

    def count(self, what: str) -> int:
        """A number of entries."""
        if (count := self.number(SIZE.size)) > MOST_ENTRIES:
            raise ValueError(f"it has {count} {what}; at most {MOST_ENTRIES} are read")
        return count

    def string(self, longest: int = LONGEST) -> str:
        """A string."""
        if (size := self.number(SIZE.size)) > longest:
            raise ValueError(
                f"the string after byte {self.at} has {size} bytes; at most {longest} are read"
            )
        begin = self.take(size)
        return self.content[begin : self.at].decode()

    def names(self, count: int) -> Iterator[str]:
        """Names of entries, each of which is read by whoever takes it; each must be another."""
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
        """A value of some type: a string, a number, a truth value or an `Array`."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(name)
        if kind not in NUMBERS:
            raise ValueError(f"{name} is of type {kind}, which is unknown")
        begin = self.take(NUMBERS[kind].itemsize)
        return np.frombuffer(self.content[begin : self.at], NUMBERS[kind])[0].item()

    def array(self, name: str) -> Array:
        """An array, whose elements stay where they are."""
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
        """Type, sizes and offset of a tensor."""
        if not 1 <= (count := self.number(4)) <= MOST_DIMENSIONS:
            raise ValueError(
                f"tensor {name!r} has {count} dimensions; 1 to {MOST_DIMENSIONS} are read"
            )
        sizes = tuple(self.number(SIZE.size) for _ in range(count))
        if not all(sizes):
            raise ValueError(f"tensor {name!r} has sizes {sizes}; each must be at least 1")
        return Info(kind=self.number(4), sizes=sizes, offset=self.number(SIZE.size))


def check_version(version: int) -> None:
    """Raise `ValueError` for a version that is not read."""
    if version in VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise ValueError("it is big-endian, and only little-endian files are read: convert it anew")
    known = " and ".join(map(str, VERSIONS))
    raise ValueError(f"it is of version {version}; {known} are read")


def strings(content: bytes | mmap, at: int, count: int) -> Iterator[tuple[int, int]]:
    """Where each of the strings that follow each other begins and ends.

    Raises `ValueError` where the bytes end before.
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
                f"it is cut, or a length before byte {begin} is wrong: it has {end} bytes"
            )
        yield begin, at
