"""Strings of JSON schemas, as automata over their text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import reduce
from re import _constants  # type: ignore[attr-defined]
from typing import Any

from outpace.constraint.dfa import (
    Dfa,
    StepBudget,
    determinize_nfa,
    dfa_accepts,
    intersect_dfas,
    keep_dfas,
)
from outpace.constraint.keywords import (
    KEYWORD_ALTERNATIVES,
    SchemaCase,
    SubSchema,
    count_bounds,
    refuse_keyword,
    require_type,
)
from outpace.constraint.numbers import pattern_dfa
from outpace.constraint.pattern import (
    END_ANCHORS,
    START_ANCHORS,
    ByteRanges,
    CodeRange,
    NfaBuilder,
    TooLargeError,
    UnsupportedError,
    exclude_range,
    intersect_ranges,
    matched_ranges,
    parse_pattern,
    utf8_ranges,
)
from outpace.constraint.pieces import (
    NO_TEXT,
    DfaPiece,
    JsonPiece,
    LiteralPiece,
    RepeatPiece,
    SequencePiece,
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


@keep_dfas
def search_dfa(pattern: str, *, budget: StepBudget | None = None) -> Dfa:
    """Return the automaton of JSON-encoded strings that contain a match of a pattern."""
    # A string is accepted if both Python and ECMA 262 find the pattern.
    for what, sign in PYTHON_SYNTAX.items():
        if sign.search(pattern):
            raise UnsupportedError(f"{what} is not part of ECMA 262")
    try:
        tree = parse_pattern(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if tree.state.flags & ~_constants.SRE_FLAG_UNICODE:
        raise UnsupportedError(NO_FLAGS)
    weaver = SearchNfaBuilder(tree.state.flags)
    weaver.nfa.end = weaver.add_sequence(tree, 0, first=True, last=True)
    return determinize_nfa(weaver.nfa, budget)


NO_FLAGS = "a flag such as (?i) is not supported"


ANY_CHARACTER = (_constants.IN, [(_constants.RANGE, (0, 0x10FFFF))])
"""Node of a set of all characters."""


@dataclass(slots=True)
class SearchNfaBuilder(NfaBuilder):
    """Build the NFA of the strings that contain a match of a parsed pattern."""

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
        return NfaBuilder.add_node(self, node, at, first=first, last=last)

    def add_anything(self, at: int) -> int:
        return self.add_repeat(0, _constants.MAXREPEAT, [ANY_CHARACTER], at)

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
        """Return the characters that a node matches in both dialects."""
        found = matched_ranges(node, self.flags)
        if node[0] is _constants.ANY:
            for line in ECMA_LINE_ENDS:
                found = list(exclude_range(found, line))
        if node[0] is _constants.IN and any(kind is _constants.CATEGORY for kind, _ in node[1]):
            ascii_only = matched_ranges(node, _constants.SRE_FLAG_ASCII)
            found = list(exclude_range(intersect_ranges(found, ascii_only), BYTE_ORDER_MARK))
        return found


def is_anchored(node: Any, anchors: tuple[Any, ...]) -> bool:
    """Return whether a node at an edge is an anchor, or a group that handles its own edge."""
    return str(node[0]) in GROUP_NODES or (str(node[0]) == "AT" and node[1] in anchors)


HEX = "[0-9a-f]"
DATE = "[1-9][0-9]{3}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-]0[0-9]:[0-5][0-9])"
"""Dates end at the 28th, which every month has."""
LABEL = "[a-z0-9]{1,15}(?:-[a-z0-9]{1,15})?"
HOST_PATTERN = rf"{LABEL}(?:\.{LABEL}){{0,2}}\.[a-z]{{2,10}}"
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
COUNT_PATTERN = "[0-9]{1,4}"
CLOCK = (
    f"(?:{COUNT_PATTERN}H(?:{COUNT_PATTERN}M(?:{COUNT_PATTERN}S)?)?"
    f"|{COUNT_PATTERN}M(?:{COUNT_PATTERN}S)?|{COUNT_PATTERN}S)"
)
DAYS = (
    f"(?:{COUNT_PATTERN}Y(?:{COUNT_PATTERN}M(?:{COUNT_PATTERN}D)?)?"
    f"|{COUNT_PATTERN}M(?:{COUNT_PATTERN}D)?|{COUNT_PATTERN}D)"
)
STRING_FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": f"P(?:{DAYS}(?:T{CLOCK})?|T{CLOCK}|{COUNT_PATTERN}W)",
    "uuid": f"{HEX}{{8}}(?:-{HEX}{{4}}){{3}}-{HEX}{{12}}",
    "hostname": HOST_PATTERN,
    "email": rf"[a-zA-Z0-9_+-]{{1,20}}(?:\.[a-zA-Z0-9_+-]{{1,20}}){{0,2}}@{HOST_PATTERN}",
    "ipv4": rf"{BYTE}(?:\.{BYTE}){{3}}",
    "ipv6": f"{HEX}{{1,4}}(?::{HEX}{{1,4}}){{7}}",
    "uri": rf"(?:https?|ftp)://{HOST_PATTERN}(?::[1-9][0-9]{{0,3}})?(?:/[a-zA-Z0-9._~-]*)*"
    r"(?:\?[a-zA-Z0-9._~=&-]*)?(?:#[a-zA-Z0-9._~-]*)?",
}
"""Patterns of formats; each match is valid, but not every valid string matches."""


PATTERN_FEATURES = "pattern with look-around, back-references, \\b, flags"


def string_piece(
    case: SchemaCase, counted: int | None = None, budget: StepBudget | None = None
) -> JsonPiece:
    """Return the piece of a string for which all keywords of a case hold.

    Upper lengths above `counted` are omitted if it is given and only lengths constrain the string.
    """
    least, most = count_bounds(case, "Length")
    if most is not None and most < least:
        return NO_TEXT
    found = string_dfas(case, budget)
    if not found:
        if counted is not None and most is not None and most > counted:
            most = None
        return quote_piece(RepeatPiece(DfaPiece(pattern_dfa(STRING_CHARACTER)), least, most))
    if least or most is not None:
        counts = f"{STRING_CHARACTER}{{{least},{'' if most is None else most}}}"
        found.append(pattern_dfa(counts, budget=budget))
    return quote_piece(DfaPiece(reduce(intersect_dfas, found)))


def string_dfas(case: SchemaCase, budget: StepBudget | None) -> list[Dfa]:
    return [
        *(pattern_dfa(STRING_FORMATS[name]) for schema in case for name in format_names(schema)),
        *(schema_pattern_dfa(schema, budget) for schema in case if "pattern" in schema.value),
    ]


def string_fits(value: str, case: SchemaCase, budget: StepBudget | None = None) -> bool:
    """Return whether a listed string satisfies the keywords of a case."""
    least, most = count_bounds(case, "Length")
    return least <= len(value) <= (len(value) if most is None else most) and all(
        dfa_accepts(dfa, escaped_text(value).encode()) for dfa in string_dfas(case, budget)
    )


def quote_piece(part: JsonPiece) -> JsonPiece:
    return SequencePiece((LiteralPiece('"'), part, LiteralPiece('"')))


def escaped_text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)[1:-1]


def format_names(schema: SubSchema) -> list[str]:
    """Return the format of a schema as a list of at most one."""
    if "format" not in schema.value:
        return []
    name = require_type(schema.value["format"], str, f"format at {schema.at}")
    if name not in STRING_FORMATS:
        refuse_keyword(f"format {name!r}", schema.at, "any other format")
    return [name]


def schema_pattern_dfa(schema: SubSchema, budget: StepBudget | None) -> Dfa:
    pattern = require_type(schema.value["pattern"], str, f"pattern at {schema.at}")
    return search_pattern_dfa(pattern, schema.at, budget)


def search_pattern_dfa(text: str, at: str, budget: StepBudget | None) -> Dfa:
    """Return the automaton of strings that contain a match of the pattern at a place."""
    try:
        return search_dfa(text, budget=budget)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"pattern {text!r} at {at}: {error}; {KEYWORD_ALTERNATIVES[PATTERN_FEATURES]}"
        ) from error
    except TooLargeError as error:
        raise TooLargeError(f"pattern {text!r} at {at}: {error}") from error
    except ValueError as error:
        raise ValueError(f"pattern {text!r} at {at} is malformed: {error}") from error
