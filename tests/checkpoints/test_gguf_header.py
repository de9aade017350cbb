"""Invalid headers of GGUF files: refused at once, with one line."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from outpace.checkpoints.gguf.file import open_gguf
from outpace.checkpoints.gguf.header import MAX_ELEMENTS, NUMBER_TYPES, MetadataArray
from outpace.checkpoints.load import load_config, load_model, load_tokenizer

STRING, ARRAY = 8, 9
U32, I32, F32 = 4, 5, 6
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def array(kind: int, values: list[Any], count: int | None = None) -> bytes:
    body = b"".join(
        text(v) if kind == STRING else struct.pack("<" + CODES[kind], v) for v in values
    )
    return struct.pack("<IQ", kind, len(values) if count is None else count) + body


def field(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def number(name: str, value: int) -> bytes:
    return field(name, U32, struct.pack("<I", value))


def tensor(name: str, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    head = text(name) + struct.pack("<I", len(sizes))
    return head + struct.pack(f"<{len(sizes)}QIQ", *sizes, kind, offset)


def file(
    fields: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: bytes = bytes(64),
) -> bytes:
    """Return a file, whose tensors begin at the next multiple of 32."""
    fields, tensors = fields or [], tensors or []
    lengths = counts or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version, *lengths) + b"".join(fields + tensors)
    return head + bytes(-len(head) % 32) + data


NESTED = field("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + array(U32, [1]))

BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not begin with GGUF"),
    "foreign": (b"PK\3\4" + bytes(100), "does not begin with GGUF"),
    "magic alone": (b"GGUF", "it is truncated: 4 bytes should follow byte 4 of 4"),
    "version 1": (file(version=1), "it is of version 1; supported: 2 and 3"),
    "big-endian": (file(version=3 << 24), "it is big-endian, and only little-endian files"),
    "tensors": (file(counts=(2**62, 0)), f"it has {2**62} tensors; at most 65536 are read"),
    "fields": (file(counts=(0, 2**40)), f"it has {2**40} fields; at most 65536 are read"),
    "more fields": (file([number("a", 1)], counts=(0, 9)), "two entries have the name ''"),
    "name": (file([struct.pack("<Q", 2**60)]), f"has {2**60} bytes; at most 1024 are read"),
    "name twice": (file([number("a", 1)] * 2), "two entries have the name 'a'"),
    "name of no text": (file([field(b"\xff", U32, bytes(4))]), "'utf-8' codec can't decode"),
    "name of two lines": (file([number("a\nb", 1)]), r"has the name 'a\\nb', which cannot be prin"),
    "type": (file([field("a", 13, bytes(8))]), "a is of type 13, which is unknown"),
    "string": (
        file([field("a", STRING, struct.pack("<Q", 2**63))]),
        f"has {2**63} bytes; at most {2**24} are read",
    ),
    "string past the end": (
        file([field("a", STRING, struct.pack("<Q", 5000))]),
        "it is truncated: 5000",
    ),
    "array": (
        file([field("a", ARRAY, array(U32, [], 2**61))]),
        f"a is an array of {2**61}; at most {MAX_ELEMENTS} are read of all arrays",
    ),
    "arrays": (
        file([field(n, ARRAY, array(0, [0] * 2**21)) for n in "abc"]),
        f"c is an array of {2**21}; at most",
    ),
    "array past the end": (
        file([field("a", ARRAY, array(U32, [1], 999))]),
        "is truncated: 3996 bytes",
    ),
    "array of an unknown type": (
        file([field("a", ARRAY, struct.pack("<IQ", 77, 1))]),
        "a is an array of type 77, which is not supported",
    ),
    "nested array": (file([NESTED]), "a is an array of type 9, which is not supported"),
    "strings past the end": (
        file([field("a", ARRAY, array(STRING, ["x"], 2**20))]),
        "it is truncated, or a length before byte",
    ),
    "length in an array": (
        file([field("a", ARRAY, struct.pack("<IQQ", STRING, 1, 2**63))]),
        "it is truncated, or a length before byte",
    ),
    "alignment": (
        file([number("general.alignment", 33)]),
        "general.alignment must be a power of two",
    ),
    "no alignment": (
        file([number("general.alignment", 0)]),
        "general.alignment must be a power of two",
    ),
    "alignment of text": (
        file([field("general.alignment", STRING, text("x"))]),
        "general.alignment must be a power of two, got 'x'",
    ),
    "dimensions": (file([], [tensor("t", [])]), "tensor 't' has 0 dimensions; 1 to 4 are read"),
    "more dimensions": (
        file([], [text("t") + struct.pack("<I", 2**31)]),
        f"tensor 't' has {2**31} dimensions; 1 to 4 are read",
    ),
    "no size": (file([], [tensor("t", [4, 0])]), r"tensor 't' has sizes \(4, 0\); each must be"),
    "product": (file([], [tensor("t", [2**63] * 4)]), "is truncated: tensor 't' ends at byte"),
    "tensor type": (file([], [tensor("t", [4], 99)]), "tensor 't' is of type 99, which is unknown"),
    "rows": (file([], [tensor("t", [33], 8)]), "'t' has rows of 33, and Q8_0 has blocks of 32"),
    "offset": (file([], [tensor("t", [4], offset=8)]), "begins at byte 8, which is not a multiple"),
    "offset past the end": (
        file([], [tensor("t", [4], offset=2**62)]),
        "is truncated: tensor 't' ends",
    ),
    "tensor twice": (file([], [tensor("t", [4])] * 2), "two entries have the name 't'"),
    "part": (file([number("split.count", 3)]), "is one of 3 parts: it must be named as they are"),
}


def refused(path: Path) -> str:
    began = time.process_time()
    with pytest.raises(ValueError) as error:
        for read in (load_config, load_tokenizer, load_model):
            read(path)  # type: ignore[operator]
    assert time.process_time() - began < 6
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < 600 + len(str(path))
    return str(error.value)


@pytest.mark.parametrize("name", BROKEN)
def test_wrong_lengths_are_refused(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        open_gguf(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", CODES)
def test_every_type_of_number_is_read(kind: int, tmp_path: Path) -> None:
    value = {7: True, F32: 0.1, 12: 0.1}.get(kind, 7)
    packed = struct.pack("<" + CODES[kind], value)
    path = tmp_path / "numbers.gguf"
    fields = [field("one", kind, packed), field("many", ARRAY, array(kind, [value] * 3))]
    path.write_bytes(file(fields, [tensor("t", [4])]))
    found, wanted = open_gguf(path).metadata, GGUFReader(path).fields
    assert found["one"] == wanted["one"].contents() and type(found["one"]) is type(value)
    assert found["many"].read_values() == wanted["many"].contents() and len(found["many"]) == 3
    assert found["many"].holds_type(type(value)) and not found["many"].holds_type(str)
    assert set(NUMBER_TYPES) == set(CODES)


def test_strings_are_read_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "strings.gguf"
    words = ["", "a", "\u2581é", "x" * 300]
    odd = array(STRING, [b"\xff"])
    path.write_bytes(file([field("a", ARRAY, array(STRING, words)), field("b", ARRAY, odd)]))
    found = open_gguf(path).metadata
    assert isinstance(found["a"], MetadataArray) and found["a"].read_values() == words
    with pytest.raises(ValueError, match="'utf-8' codec can't decode"):
        found["b"].read_values()
    path.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="the file has changed"):
        found["a"].read_values()
