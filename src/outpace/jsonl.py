"""Files of JSON lines, in which a bad line is named by its place."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_records(path: Path, limit: int | None = None) -> list[tuple[str, Record]]:
    """The first records of a file, each with its place as `file:line`; as `parse` refuses them.

    One whose name ends in `.gz` is compressed.
    """
    # Only a line feed ends a line: JSON may hold other characters that Python splits at.
    lines = content(path).rstrip().split(b"\n")[:limit]
    places = (f"{path}:{number}" for number in range(1, len(lines) + 1))
    return [(place, parse(line, place)) for place, line in zip(places, lines, strict=True)]


def content(path: Path) -> bytes:
    """What a file holds; `ValueError` where it should be compressed and is not."""
    held = path.read_bytes()
    try:
        return gzip.decompress(held) if path.suffix == ".gz" else held
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no file of gzip: {error}") from error


def parse(line: bytes, place: str) -> Record:
    """The object of one line; `ValueError` with its place where there is none."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place} must be an object, not {type(record).__name__}")
    return record
