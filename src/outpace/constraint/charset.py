"""Sets of characters as the bytes of their UTF-8 encoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

CodeRange = tuple[int, int]
"""First and last of a range of characters, or of bytes."""

ByteRanges = tuple[CodeRange, ...]
"""Consecutive byte ranges."""

UTF8_LAST_CHARACTERS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)
"""Last character with one, two, three and four bytes."""

SURROGATES = (0xD800, 0xDFFF)


@cache
def all_characters() -> str:
    """Return all characters in order."""
    return "".join(map(chr, range(0x110000)))


def matched_ranges(node: Any, flags: int) -> list[CodeRange]:
    """Return the encodable characters that a node of a parsed pattern matches.

    `re` itself matches them, so that classes, flags and Unicode have its meaning.
    """
    if is_literal(node, flags):
        spans = [(node[1], node[1])]
    elif is_explicit_set(node, flags):
        spans = [(part, part) if kind is _constants.LITERAL else part for kind, part in node[1]]
    else:
        state = _parser.State()
        state.flags, state.str = flags, ""
        one = _parser.SubPattern(state, [node])
        runs = [(_constants.MAX_REPEAT, (1, _constants.MAXREPEAT, one))]
        found = _compiler.compile(_parser.SubPattern(state, runs), flags).finditer(all_characters())
        spans = [(run.start(), run.end() - 1) for run in found]
    return list(exclude_range(spans, SURROGATES))


def is_literal(node: Any, flags: int) -> bool:
    """Return whether a node matches one literal character, case-sensitively."""
    return node[0] is _constants.LITERAL and not flags & _constants.SRE_FLAG_IGNORECASE


def is_explicit_set(node: Any, flags: int) -> bool:
    """Return whether a node lists literal characters and ranges only, case-sensitively."""
    allowed = (_constants.LITERAL, _constants.RANGE)
    return (
        node[0] is _constants.IN
        and all(kind in allowed for kind, _ in node[1])
        and not flags & _constants.SRE_FLAG_IGNORECASE
    )


def exclude_range(spans: Iterable[CodeRange], hole: CodeRange) -> Iterator[CodeRange]:
    """Yield the parts of ranges outside another range."""
    for low, high in spans:
        if low < hole[0]:
            yield low, min(high, hole[0] - 1)
        if high > hole[1]:
            yield max(low, hole[1] + 1), high


def intersect_ranges(one: Iterable[CodeRange], other: Iterable[CodeRange]) -> list[CodeRange]:
    """Return the characters in both sets of ranges."""
    rest = list(other)
    return [
        (max(low, first), min(high, last))
        for low, high in one
        for first, last in rest
        if max(low, first) <= min(high, last)
    ]


def utf8_ranges(low: int, high: int) -> Iterator[ByteRanges]:
    """Yield the characters `low` to `high` as sequences of byte ranges."""
    for last in UTF8_LAST_CHARACTERS:
        if low <= last < high:
            yield from utf8_ranges(low, last)
            low = last + 1
    for places in range(len(chr(high).encode()) - 1, 0, -1):
        each = 64**places  # characters that share all bytes except these last ones
        if low // each != high // each:
            if low % each:
                edge = low - low % each + each
                yield from utf8_ranges(low, edge - 1)
                yield from utf8_ranges(edge, high)
                return
            if high % each != each - 1:
                edge = high - high % each
                yield from utf8_ranges(low, edge - 1)
                yield from utf8_ranges(edge, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
