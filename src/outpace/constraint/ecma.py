"""Patterns of JSON schemas: searches of ECMA 262 in strings as JSON writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from re import _constants  # type: ignore[attr-defined]
from typing import Any

from outpace.constraint.charset import (
    ByteRanges,
    CodeRange,
    exclude_range,
    intersect_ranges,
    matched_ranges,
    utf8_ranges,
)
from outpace.constraint.dfa import Dfa, determinize_nfa
from outpace.constraint.pattern import (
    END_ANCHORS,
    START_ANCHORS,
    NfaBuilder,
    UnsupportedError,
    parse_pattern,
)

ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""Characters written with a backslash, and the letter after it."""

CONTROLS: tuple[CodeRange, ...] = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F))
"""Characters that are never written unescaped; those without a short escape are excluded."""

STRING_CHARACTER = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\bfnrt])'
"""A character of a string. Each has one spelling, so equal strings are written identically."""

ECMA_LINE_ENDS: tuple[CodeRange, ...] = ((0x0D, 0x0D), (0x2028, 0x2029))
"""Line ends that `.` matches in Python and not in ECMA 262."""

BYTE_ORDER_MARK = (0xFEFF, 0xFEFF)
"""White space in ECMA 262 but not in Python."""

GROUP_NODES = ("BRANCH", "SUBPATTERN")

PYTHON_SYNTAX = {
    r"\A": re.compile(r"(?<!\\)(?:\\\\)*\\A"),
    r"\Z": re.compile(r"(?<!\\)(?:\\\\)*\\Z"),
    "{,n}": re.compile(r"(?<!\\)(?:\\\\)*\{,\d*\}"),
    "a comment": re.compile(r"\(\?#"),
}
"""Syntax that Python interprets differently from ECMA 262."""


@lru_cache(128)
def search_dfa(pattern: str, *, loose: bool = False) -> Dfa:
    """Return the automaton of JSON-encoded strings that contain a match of a pattern.

    A string is accepted if both Python and ECMA 262 find the pattern, or with `loose` if one of
    them may.

    Raises:
        UnsupportedError: if the pattern uses an unsupported construct.
        TooLargeError: if the automaton is too large.
        ValueError: if the pattern is malformed.
    """
    for what, sign in PYTHON_SYNTAX.items():
        if sign.search(pattern):
            raise UnsupportedError(f"{what} is not part of ECMA 262")
    try:
        tree = parse_pattern(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if tree.state.flags & ~_constants.SRE_FLAG_UNICODE:
        raise UnsupportedError(NO_FLAGS)
    weaver = SearchNfaBuilder(tree.state.flags, loose=loose)
    weaver.nfa.end = weaver.add_sequence(tree, 0, first=True, last=True)
    return determinize_nfa(weaver.nfa)


NO_FLAGS = "a flag such as (?i) is not supported"


@dataclass(slots=True)
class SearchNfaBuilder(NfaBuilder):
    """Build the NFA of the strings that contain a match of a parsed pattern."""

    loose: bool = False

    def add_sequence(self, nodes: Any, at: int, *, first: bool, last: bool) -> int:
        """Add consecutive nodes, with any text before and after unless anchored."""
        if first and not (nodes and is_anchored(nodes[0], START_ANCHORS)):
            at = self.add_anything(at)
        at = NfaBuilder.add_sequence(self, nodes, at, first=first, last=last)
        if last and not (nodes and is_anchored(nodes[-1], END_ANCHORS)):
            at = self.add_anything(at)
        return at

    def add_node(self, node: Any, at: int, *, first: bool, last: bool) -> int:
        """Add one node; flags inside a group are not supported."""
        kind, value = node
        if str(kind) == "SUBPATTERN" and (value[1] or value[2]):
            raise UnsupportedError(NO_FLAGS)
        end = NfaBuilder.add_node(self, node, at, first=first, last=last)
        if self.loose and value is _constants.AT_END:  # in Python, $ also matches before a newline
            after = self.add_characters((_constants.LITERAL, 0x0A), end)
            self.nfa.epsilon_edges[end].append(after)
            return after
        return end

    def add_anything(self, at: int) -> int:
        """Add any characters."""
        every = (_constants.IN, [(_constants.RANGE, (0, 0x10FFFF))])
        return self.add_repeat(0, _constants.MAXREPEAT, [every], at)

    def encode_characters(self, node: Any) -> list[ByteRanges]:
        """Return the JSON-encoded bytes of the characters that a node matches."""
        spans = self.node_ranges(node)
        escaped = [ord(char) for char in ESCAPES if any(a <= ord(char) <= b for a, b in spans)]
        for control in CONTROLS:
            spans = list(exclude_range(spans, control))
        plain = [way for span in spans for way in utf8_ranges(*span)]
        letters = [ord(ESCAPES[chr(char)]) for char in escaped]
        return plain + [((0x5C, 0x5C), (letter, letter)) for letter in letters]

    def node_ranges(self, node: Any) -> list[CodeRange]:
        """Return the characters that a node matches in both dialects, or if `loose` in either."""
        found = matched_ranges(node, self.flags)
        if node[0] is _constants.ANY and not self.loose:
            for line in ECMA_LINE_ENDS:
                found = list(exclude_range(found, line))
        if has_categories(node):
            ascii_only = matched_ranges(node, _constants.SRE_FLAG_ASCII)
            if self.loose:
                return [*found, *ascii_only, BYTE_ORDER_MARK]
            found = list(exclude_range(intersect_ranges(found, ascii_only), BYTE_ORDER_MARK))
        return found


def is_anchored(node: Any, anchors: tuple[Any, ...]) -> bool:
    """Return whether a node at an edge is an anchor, or a group that handles its own edge."""
    return str(node[0]) in GROUP_NODES or (str(node[0]) == "AT" and node[1] in anchors)


def has_categories(node: Any) -> bool:
    """Return whether a node uses a class such as digits."""
    return node[0] is _constants.IN and any(each[0] is _constants.CATEGORY for each in node[1])
