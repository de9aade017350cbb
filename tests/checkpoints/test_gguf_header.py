"""Invalid headers of GGUF files: refused at once, with one line."""

import struct
from pathlib import Path

import pytest
from gguf import GGUFReader

from gguf_bytes import ARRAY, CODES, F32, STRING, U32, array, field, file, number, tensor, text
from outpace.checkpoints.gguf.file import NUMBER_TYPES, MetadataArray, open_gguf

NESTED = field("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + array(U32, [1]))


def long_text(size: int) -> bytes:
    return struct.pack("<Q", size)


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "foreign": b"PK\3\4" + bytes(100),
    "magic alone": b"GGUF",
    "version 1": file(version=1),
    "big-endian": file(version=3 << 24),
    "tensors": file(counts=(2**62, 0)),
    "fields": file(counts=(0, 2**40)),
    "more fields": file([number("a", 1)], counts=(0, 9)),
    "name": file([long_text(2**60)]),
    "name twice": file([number("a", 1)] * 2),
    "name of no text": file([field(b"\xff", U32, bytes(4))]),
    "name of two lines": file([number("a\nb", 1)]),
    "type": file([field("a", 13, bytes(8))]),
    "string": file([field("a", STRING, long_text(2**63))]),
    "string past the end": file([field("a", STRING, long_text(5000))]),
    "array": file([field("a", ARRAY, array(U32, [], 2**61))]),
    "arrays": file([field(n, ARRAY, array(0, [0] * 2**21)) for n in "abc"]),
    "array past the end": file([field("a", ARRAY, array(U32, [1], 999))]),
    "array of an unknown type": file([field("a", ARRAY, struct.pack("<IQ", 77, 1))]),
    "nested array": file([field("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + array(U32, [1]))]),
    "strings past the end": file([field("a", ARRAY, array(STRING, ["x"], 2**20))]),
    "length in an array": file([field("a", ARRAY, struct.pack("<IQQ", STRING, 1, 2**63))]),
    "alignment": file([number("general.alignment", 33)]),
    "no alignment": file([number("general.alignment", 0)]),
    "alignment of text": file([field("general.alignment", STRING, text("x"))]),
    "dimensions": file([], [tensor("t", [])]),
    "more dimensions": file([], [text("t") + struct.pack("<I", 2**31)]),
    "no size": file([], [tensor("t", [4, 0])]),
    "product": file([], [tensor("t", [2**63] * 4)]),
    "tensor type": file([], [tensor("t", [4], 99)]),
    "rows": file([], [tensor("t", [33], 8)]),
    "offset": file([], [tensor("t", [4], offset=8)]),
    "offset past the end": file([], [tensor("t", [4], offset=2**62)]),
    "tensor twice": file([], [tensor("t", [4])] * 2),
    "part": file([number("split.count", 3)]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_invalid_headers_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(BROKEN[name])
    with pytest.raises(ValueError) as error:
        open_gguf(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < 600 + len(str(path))


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
    with pytest.raises(ValueError, match="utf-8"):
        found["b"].read_values()
    path.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="changed"):
        found["a"].read_values()
