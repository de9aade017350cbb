"""Read JSON Lines files, with file and line number in every error."""

from __future__ import annotations

import gzip
import json
import zlib
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

JsonRecord = dict[str, Any]


def read_records(path: Path, limit: int | None = None) -> list[tuple[str, JsonRecord]]:
    """Return the first `limit` records of a file, each with its location `file:line`.

    Raises:
        ValueError: If the file is not valid gzip, has no records, or a line is not a JSON object.
    """
    return [(place, parse_record(line, place)) for place, line in read_lines(path)[:limit]]


def read_lines(path: Path) -> list[tuple[str, bytes]]:
    """Return the lines of a file, each with its location `file:line`.

    Files whose name ends in `.gz` are decompressed. A byte order mark and blank lines are ignored.

    Raises:
        ValueError: If the file is not valid gzip, or has no records.
    """
    # JSON strings may contain other characters that `str.splitlines` splits at.
    lines = read_content(path).removeprefix(BOM_UTF8).split(b"\n")
    placed = [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not placed:
        raise ValueError(f"{path} has no records")
    return placed


def read_content(path: Path) -> bytes:
    """Return the bytes of a file, decompressed if its name ends in `.gz`.

    Raises:
        ValueError: If a `.gz` file is not valid gzip.
    """
    data = path.read_bytes()
    try:
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a gzip file: {error}") from error


def parse_record(line: bytes, place: str) -> JsonRecord:
    """Return the JSON object of one line.

    Args:
        line: Bytes of the line.
        place: Its location `file:line`, for error messages.

    Raises:
        ValueError: If the line is not a JSON object.
    """
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place} must be an object, not {type(record).__name__}")
    return record
