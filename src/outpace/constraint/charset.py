"""Sets of characters as the bytes of their UTF-8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

Span = tuple[int, int]
"""First and last of some neighbours: of characters, or of bytes."""

Way = tuple[Span, ...]
"""Spans of bytes, one after the other."""

LENGTHS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)
"""Last character of one byte, of two, of three and of four."""

SURROGATES = (0xD800, 0xDFFF)


@cache
def everything() -> str:
    """All characters, in order."""
    return "".join(map(chr, range(0x110000)))


def matched(node: Any, flags: int) -> list[Span]:
    """Characters that have UTF-8 and that a node of a parsed pattern matches.

    `re` itself is asked, so that classes, flags and Unicode mean what they mean there.
    """
    if alone(node, flags):
        spans = [(node[1], node[1])]
    elif ranged(node, flags):
        spans = [(part, part) if kind is _constants.LITERAL else part for kind, part in node[1]]
    else:
        state = _parser.State()
        state.flags, state.str = flags, ""
        one = _parser.SubPattern(state, [node])
        runs = [(_constants.MAX_REPEAT, (1, _constants.MAXREPEAT, one))]
        found = _compiler.compile(_parser.SubPattern(state, runs), flags).finditer(everything())
        spans = [(run.start(), run.end() - 1) for run in found]
    return list(without(spans, SURROGATES))


def alone(node: Any, flags: int) -> bool:
    """Whether a node matches one character, whatever its case."""
    return node[0] is _constants.LITERAL and not flags & _constants.SRE_FLAG_IGNORECASE


def ranged(node: Any, flags: int) -> bool:
    """Whether a node matches what it names by character and range, whatever their case."""
    named = (_constants.LITERAL, _constants.RANGE)
    return (
        node[0] is _constants.IN
        and all(kind in named for kind, _ in node[1])
        and not flags & _constants.SRE_FLAG_IGNORECASE
    )


def without(spans: Iterable[Span], hole: Span) -> Iterator[Span]:
    """What is left of spans outside of another."""
    for low, high in spans:
        if low < hole[0]:
            yield low, min(high, hole[0] - 1)
        if high > hole[1]:
            yield max(low, hole[1] + 1), high


def common(one: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """Characters that lie in spans of both."""
    rest = list(other)
    return [
        (max(low, first), min(high, last))
        for low, high in one
        for first, last in rest
        if max(low, first) <= min(high, last)
    ]


def utf8(low: int, high: int) -> Iterator[Way]:
    """Characters `low` to `high` as sequences of spans of bytes."""
    for last in LENGTHS:
        if low <= last < high:
            yield from utf8(low, last)
            low = last + 1
    for places in range(len(chr(high).encode()) - 1, 0, -1):
        each = 64**places  # characters that share all but their last bytes
        if low // each != high // each:
            if low % each:
                edge = low - low % each + each
                yield from utf8(low, edge - 1)
                yield from utf8(edge, high)
                return
            if high % each != each - 1:
                edge = high - high % each
                yield from utf8(low, edge - 1)
                yield from utf8(edge, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
