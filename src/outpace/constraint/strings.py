"""Strings of JSON schemas, as automata over their text."""

from __future__ import annotations

import json
from functools import reduce

from outpace.constraint.algebra import dfa_accepts, intersect_dfas, subtract_dfa
from outpace.constraint.decimals import pattern_dfa
from outpace.constraint.dfa import Dfa
from outpace.constraint.ecma import STRING_CHARACTER, search_dfa
from outpace.constraint.keywords import KEYWORD_ALTERNATIVES, refuse_keyword, require_type
from outpace.constraint.pattern import TooLargeError, UnsupportedError
from outpace.constraint.pieces import (
    NO_TEXT,
    DfaPiece,
    JsonPiece,
    LiteralPiece,
    RepeatPiece,
    SequencePiece,
)
from outpace.constraint.rules import SchemaCase, SubSchema, count_bounds, exclusions

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


def string_piece(case: SchemaCase, counted: int | None = None) -> JsonPiece:
    """Return the piece of a string for which all keywords of a case hold.

    Upper lengths above `counted` are omitted if it is given and only lengths constrain the string.
    """
    least, most = count_bounds(case, "Length")
    if most is not None and most < least:
        return NO_TEXT
    found = string_dfas(case)
    out = [value for schema in case for value in exclusions(schema)[1] if isinstance(value, str)]
    if not (found or out):
        if counted is not None and most is not None and most > counted:
            most = None
        return quote_piece(RepeatPiece(DfaPiece(pattern_dfa(STRING_CHARACTER)), least, most))
    if least or most is not None or not found:
        found.append(pattern_dfa(f"{STRING_CHARACTER}{{{least},{'' if most is None else most}}}"))
    dfa = reduce(intersect_dfas, found)
    return quote_piece(
        DfaPiece(subtract_dfa(dfa, Dfa.from_texts(map(escaped_text, out))) if out else dfa)
    )


def string_dfas(case: SchemaCase) -> list[Dfa]:
    """Return the automata of the formats and patterns of a case."""
    return [
        *(pattern_dfa(STRING_FORMATS[name]) for schema in case for name in format_names(schema)),
        *(schema_pattern_dfa(schema) for schema in case if "pattern" in schema.value),
    ]


def string_fits(value: str, case: SchemaCase) -> bool:
    """Return whether a listed string satisfies the keywords of a case."""
    least, most = count_bounds(case, "Length")
    return least <= len(value) <= (len(value) if most is None else most) and all(
        dfa_accepts(dfa, escaped_text(value).encode()) for dfa in string_dfas(case)
    )


def quote_piece(part: JsonPiece) -> JsonPiece:
    """Return a piece within quotes."""
    return SequencePiece((LiteralPiece('"'), part, LiteralPiece('"')))


def escaped_text(value: str) -> str:
    """Return the characters of a string as JSON writes them between the quotes."""
    return json.dumps(value, ensure_ascii=False)[1:-1]


def format_names(schema: SubSchema) -> list[str]:
    """Return the format of a schema as a list of at most one."""
    if "format" not in schema.value:
        return []
    name = require_type(schema.value["format"], str, f"format at {schema.at}")
    if name not in STRING_FORMATS:
        refuse_keyword(f"format {name!r}", schema.at, "any other format")
    return [name]


def schema_pattern_dfa(schema: SubSchema) -> Dfa:
    """Return the automaton of strings that contain a match of the schema's pattern."""
    pattern = require_type(schema.value["pattern"], str, f"pattern at {schema.at}")
    return search_pattern_dfa(pattern, schema.at, loose=False)


def search_pattern_dfa(text: str, at: str, *, loose: bool) -> Dfa:
    """Return the automaton of strings that contain a match of the pattern at a place.

    Raises:
        ValueError: as `search_dfa`, with the pattern and the place.
    """
    try:
        return search_dfa(text, loose=loose)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"pattern {text!r} at {at}: {error}; {KEYWORD_ALTERNATIVES[PATTERN_FEATURES]}"
        ) from error
    except TooLargeError as error:
        raise TooLargeError(f"pattern {text!r} at {at}: {error}") from error
    except ValueError as error:
        raise ValueError(f"pattern {text!r} at {at} is malformed: {error}") from error
