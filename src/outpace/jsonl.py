"""Files of JSON lines, in which a bad line is named by its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_records(path: Path, limit: int | None = None) -> list[tuple[str, Record]]:
    """The first records of a file, each with its place as `file:line`; as `parse` refuses them."""
    # Only a line feed ends a line: JSON may hold other characters that Python splits at.
    lines = path.read_bytes().rstrip().split(b"\n")[:limit]
    places = (f"{path}:{number}" for number in range(1, len(lines) + 1))
    return [(place, parse(line, place)) for place, line in zip(places, lines, strict=True)]


def parse(line: bytes, place: str) -> Record:
    """The object of one line; `ValueError` with its place where there is none."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place} must be an object, not {type(record).__name__}")
    return record
