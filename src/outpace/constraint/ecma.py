"""Patterns of JSON schemas: searches of ECMA 262 in strings as JSON writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from re import _constants  # type: ignore[attr-defined]
from typing import Any

from outpace.constraint.charset import Span, Way, common, matched, utf8, without
from outpace.constraint.dfa import Dfa, determined
from outpace.constraint.pattern import BEGINNINGS, ENDINGS, Unsupported, Weaver, parsed

ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""Characters written with a backslash, and the letter after it."""

CONTROLS: tuple[Span, ...] = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F))
"""Characters that are never written unescaped; those without a short escape are excluded."""

LETTER = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\bfnrt])'
"""A character of a string. Each has one spelling, so that equal strings have equal texts."""

LINES: tuple[Span, ...] = ((0x0D, 0x0D), (0x2028, 0x2029))
"""Line ends that `.` matches in Python and not in ECMA 262."""

MARK = (0xFEFF, 0xFEFF)
"""White space in ECMA 262 but not in Python."""

GROUPS = ("BRANCH", "SUBPATTERN")

FOREIGN = {
    r"\A": re.compile(r"(?<!\\)(?:\\\\)*\\A"),
    r"\Z": re.compile(r"(?<!\\)(?:\\\\)*\\Z"),
    "{,n}": re.compile(r"(?<!\\)(?:\\\\)*\{,\d*\}"),
    "a comment": re.compile(r"\(\?#"),
}
"""Syntax that Python interprets differently from ECMA 262."""


@lru_cache(128)
def searched(pattern: str, *, loose: bool = False) -> Dfa:
    """Return the automaton of JSON-encoded strings that contain a match of a pattern.

    A string is accepted if both Python and ECMA 262 find the pattern, or with `loose` if one of
    them may.

    Raises:
        UnsupportedError: if the pattern uses an unsupported construct.
        TooLargeError: if the automaton is too large.
        ValueError: if the pattern is malformed.
    """
    for what, sign in FOREIGN.items():
        if sign.search(pattern):
            raise Unsupported(f"{what} is not part of ECMA 262")
    try:
        tree = parsed(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if tree.state.flags & ~_constants.SRE_FLAG_UNICODE:
        raise Unsupported(NO_FLAGS)
    weaver = Search(tree.state.flags, loose=loose)
    weaver.net.end = weaver.sequence(tree, 0, first=True, last=True)
    return determined(weaver.net)


NO_FLAGS = "a flag such as (?i) is not supported"


@dataclass(slots=True)
class Search(Weaver):
    """Build the NFA of the strings that contain a match of a parsed pattern."""

    loose: bool = False

    def sequence(self, nodes: Any, at: int, *, first: bool, last: bool) -> int:
        """Add consecutive nodes, with any text before and after unless anchored."""
        if first and not (nodes and anchored(nodes[0], BEGINNINGS)):
            at = self.anything(at)
        at = Weaver.sequence(self, nodes, at, first=first, last=last)
        if last and not (nodes and anchored(nodes[-1], ENDINGS)):
            at = self.anything(at)
        return at

    def node(self, node: Any, at: int, *, first: bool, last: bool) -> int:
        """Add one node; flags inside a group are refused."""
        kind, value = node
        if str(kind) == "SUBPATTERN" and (value[1] or value[2]):
            raise Unsupported(NO_FLAGS)
        end = Weaver.node(self, node, at, first=first, last=last)
        if self.loose and value is _constants.AT_END:  # in Python, $ also matches before a newline
            after = self.characters((_constants.LITERAL, 0x0A), end)
            self.net.free[end].append(after)
            return after
        return end

    def anything(self, at: int) -> int:
        """Add any characters."""
        every = (_constants.IN, [(_constants.RANGE, (0, 0x10FFFF))])
        return self.repeat(0, _constants.MAXREPEAT, [every], at)

    def ways(self, node: Any) -> list[Way]:
        """Return the JSON-encoded bytes of the characters that a node matches."""
        spans = self.spans(node)
        escaped = [ord(char) for char in ESCAPES if any(a <= ord(char) <= b for a, b in spans)]
        for control in CONTROLS:
            spans = list(without(spans, control))
        plain = [way for span in spans for way in utf8(*span)]
        letters = [ord(ESCAPES[chr(char)]) for char in escaped]
        return plain + [((0x5C, 0x5C), (letter, letter)) for letter in letters]

    def spans(self, node: Any) -> list[Span]:
        """Return the characters that a node matches in both dialects, or if `loose` in either."""
        found = matched(node, self.flags)
        if node[0] is _constants.ANY and not self.loose:
            for line in LINES:
                found = list(without(found, line))
        if categories(node):
            ascii_only = matched(node, _constants.SRE_FLAG_ASCII)
            if self.loose:
                return [*found, *ascii_only, MARK]
            found = list(without(common(found, ascii_only), MARK))
        return found


def anchored(node: Any, anchors: tuple[Any, ...]) -> bool:
    """Return whether a node at an edge is an anchor, or a group that handles its own edge."""
    return str(node[0]) in GROUPS or (str(node[0]) == "AT" and node[1] in anchors)


def categories(node: Any) -> bool:
    """Return whether a node uses a class such as digits."""
    return node[0] is _constants.IN and any(each[0] is _constants.CATEGORY for each in node[1])
