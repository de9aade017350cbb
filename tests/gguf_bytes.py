"""Bytes of GGUF files, and files with a metadata field missing or of another type."""

import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from outpace.api.text import TextCodec
from outpace.checkpoints.checkpoint import load_tokenizer
from outpace.checkpoints.gguf.file import MetadataArray, read_header
from outpace.checkpoints.load import load_config, load_model
from outpace.errors import OptionError
from texts import TEXTS

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
    fields, tensors = fields or [], tensors or []
    lengths = counts or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version, *lengths) + b"".join(fields + tensors)
    return head + bytes(-len(head) % 32) + data


Encoded = tuple[int, bytes]
"""A type, and the bytes of a value."""
BOOL, INTS, FLOATS = 7, (0, 1, 2, 3, 4, 5, 10, 11), (6, 12)


def scalars(kinds: tuple[int, ...], value: Any) -> Iterator[Encoded]:
    for kind in kinds:
        try:
            yield kind, struct.pack("<" + CODES[kind], value)
        except struct.error:  # the value does not fit
            continue


def arrays(kinds: tuple[int, ...], values: list[Any]) -> Iterator[Encoded]:
    for kind in kinds:
        try:
            yield ARRAY, array(kind, values)
        except struct.error:
            continue


def encodings(value: Any) -> Iterator[Encoded]:
    """Yield a value in its usual type, and then in others."""
    if isinstance(value, MetadataArray):
        values = value.read_values()
        yield ARRAY, struct.pack("<IQ", value.kind, value.count) + value.read_bytes()
        yield from (next(encodings(values[0])), (STRING, text("x")), (ARRAY, array(value.kind, [])))
        if value.kind == STRING:
            yield ARRAY, array(4, [*range(len(values))])
            return
        yield ARRAY, array(STRING, [*map(str, values)])
        yield from arrays((*INTS, BOOL), [int(each) for each in values])
        yield from arrays(FLOATS, [float(each) for each in values])
    elif isinstance(value, str):
        yield STRING, text(value)
        yield from ((ARRAY, array(STRING, [value])), (STRING, text(b"\xff")), (STRING, text("")))
        yield from (*scalars((4, BOOL), 0), *scalars(FLOATS, 1.0))
    else:
        usual = BOOL if isinstance(value, bool) else 4 if isinstance(value, int) else FLOATS[0]
        yield from scalars((usual,), value)
        yield from ((STRING, text(str(value).lower())), (ARRAY, array(usual, [value])))
        yield from scalars(FLOATS, float(value))
        yield from scalars((BOOL,), bool(value))
        if value == int(value):
            yield from scalars(INTS, int(value))


def write_changed(path: Path, source: Path, name: str, value: Encoded | None) -> Path:
    """Write a file with another value of a field, or without it; its tensors are zeros."""
    header = read_header(source)
    usual = {each: next(encodings(value)) for each, value in header.metadata.items()}
    fields = [field(n, *each) for n, each in (usual | {name: value}).items() if each is not None]
    infos = [tensor(n, [*each.sizes], each.kind, each.offset) for n, each in header.tensors.items()]
    path.write_bytes(file(fields, infos, data=b""))
    os.truncate(path, path.stat().st_size + source.stat().st_size - header.begin)
    return path


def variants(source: Path, name: str) -> Iterator[Encoded | None]:
    """Yield a field's other encodings, and None for a file without it."""
    usual, *others = encodings(read_header(source).metadata[name])
    yield from dict.fromkeys((None, *others))


CONVERSATION = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is 7 times 6?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "And  8 times 6?\n"},
]


def view(path: Path, *, has_tokens: bool = True) -> dict[str, Any]:
    """Return what of a file, except its tensors, decides the tokens of an answer."""
    config = load_config(path)
    found: dict[str, Any] = {"config": vars(replace(config, source={}))}
    if not has_tokens:
        return found
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    codec = TextCodec(path.stem, tokenizer)
    try:
        chat: Any = codec.encode(CONVERSATION)
    except OptionError as error:
        chat = error.option
    ends = {*config.eos} | codec.eos | codec.turn_ends
    return found | {
        "ids": [tokenizer(each).input_ids for each in TEXTS],
        "chat": chat,
        "ends": ends,
    }


def check_variant(path: Path, name: str, wanted: dict[str, Any]) -> str:
    """Check that a file with a changed field is as the whole one, or refused by the field's name.

    Without a chat template, chats are refused.
    """
    try:
        found = view(path, has_tokens=name.startswith(("tokenizer.", "general.architecture")))
        if found["config"] != wanted["config"]:
            load_model(path)
    except ValueError as error:
        assert name in str(error), error
        return "refused"
    found = wanted | found
    if name == "tokenizer.chat_template" and found["chat"] == "messages":
        found["chat"] = wanted["chat"]
    assert found == wanted
    return "equal"
