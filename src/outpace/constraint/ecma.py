"""Patterns of JSON schemas: ECMA 262's, found anywhere in a string, as the string is written."""

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
"""Characters that are written with a backslash, and the letter after it."""

CONTROLS: tuple[Span, ...] = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F))
"""Characters that are not written as they are: the other ones of these are not written at all."""

LETTER = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\bfnrt])'
"""A character of a string. Each is written in one way, so that equal strings are equal texts."""

LINES: tuple[Span, ...] = ((0x0D, 0x0D), (0x2028, 0x2029))
"""Ends of lines that `.` matches in Python and not in ECMA 262."""

MARK = (0xFEFF, 0xFEFF)
"""White space in ECMA 262 and not in Python."""

GROUPS = ("BRANCH", "SUBPATTERN")

FOREIGN = {
    r"\A": re.compile(r"(?<!\\)(?:\\\\)*\\A"),
    r"\Z": re.compile(r"(?<!\\)(?:\\\\)*\\Z"),
    "{,n}": re.compile(r"(?<!\\)(?:\\\\)*\{,\d*\}"),
    "a comment": re.compile(r"\(\?#"),
}
"""What Python reads otherwise than ECMA 262."""


@lru_cache(128)
def searched(pattern: str, *, loose: bool = False) -> Dfa:
    """The automaton of strings, as they are written, in which a pattern is found.

    A string is accepted where both Python and ECMA 262 find the pattern, or if `loose` where one
    of them may. Raises `Unsupported` or `TooLarge`, and `ValueError` for one that is malformed.
    """
    for what, sign in FOREIGN.items():
        if sign.search(pattern):
            raise Unsupported(f"{what} is not one of ECMA 262's expressions")
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
    """Turns a parsed pattern into a net of the strings in which it is found."""

    loose: bool = False

    def sequence(self, nodes: Any, at: int, *, first: bool, last: bool) -> int:
        """Nodes one after the other, with anything around them where nothing anchors them."""
        if first and not (nodes and anchored(nodes[0], BEGINNINGS)):
            at = self.anything(at)
        at = Weaver.sequence(self, nodes, at, first=first, last=last)
        if last and not (nodes and anchored(nodes[-1], ENDINGS)):
            at = self.anything(at)
        return at

    def node(self, node: Any, at: int, *, first: bool, last: bool) -> int:
        """One node."""
        kind, value = node
        if str(kind) == "SUBPATTERN" and (value[1] or value[2]):
            raise Unsupported(NO_FLAGS)
        end = Weaver.node(self, node, at, first=first, last=last)
        if self.loose and value is _constants.AT_END:  # Python lets a line end there
            after = self.characters((_constants.LITERAL, 0x0A), end)
            self.net.free[end].append(after)
            return after
        return end

    def anything(self, at: int) -> int:
        """Any characters."""
        every = (_constants.IN, [(_constants.RANGE, (0, 0x10FFFF))])
        return self.repeat(0, _constants.MAXREPEAT, [every], at)

    def ways(self, node: Any) -> list[Way]:
        """How the characters are written that a node matches."""
        spans = self.spans(node)
        escaped = [ord(char) for char in ESCAPES if any(a <= ord(char) <= b for a, b in spans)]
        for control in CONTROLS:
            spans = list(without(spans, control))
        plain = [way for span in spans for way in utf8(*span)]
        letters = [ord(ESCAPES[chr(char)]) for char in escaped]
        return plain + [((0x5C, 0x5C), (letter, letter)) for letter in letters]

    def spans(self, node: Any) -> list[Span]:
        """Characters that a node matches, in both readings or in one of them."""
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
    """Whether a node at an edge is an anchor there, or a group that looks after its own edge."""
    return str(node[0]) in GROUPS or (str(node[0]) == "AT" and node[1] in anchors)


def categories(node: Any) -> bool:
    """Whether a node names a class such as digits."""
    return node[0] is _constants.IN and any(each[0] is _constants.CATEGORY for each in node[1])
