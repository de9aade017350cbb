"""Strings of JSON schemas, as automata over their text."""

from __future__ import annotations

import json
from functools import reduce

from outpace.constraint.algebra import accepted, difference, intersection
from outpace.constraint.decimals import read
from outpace.constraint.dfa import Dfa
from outpace.constraint.ecma import LETTER, searched
from outpace.constraint.keywords import INSTEAD, need, refuse
from outpace.constraint.pattern import TooLarge, Unsupported
from outpace.constraint.pieces import NOTHING, Chain, Leaf, Piece, Text, Times
from outpace.constraint.rules import Case, Schema, counts, excluded

HEX = "[0-9a-f]"
DATE = "[1-9][0-9]{3}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-]0[0-9]:[0-5][0-9])"
"""Dates end at the 28th, which every month has."""
LABEL = "[a-z0-9]{1,15}(?:-[a-z0-9]{1,15})?"
HOST = rf"{LABEL}(?:\.{LABEL}){{0,2}}\.[a-z]{{2,10}}"
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
COUNT = "[0-9]{1,4}"
CLOCK = f"(?:{COUNT}H(?:{COUNT}M(?:{COUNT}S)?)?|{COUNT}M(?:{COUNT}S)?|{COUNT}S)"
DAYS = f"(?:{COUNT}Y(?:{COUNT}M(?:{COUNT}D)?)?|{COUNT}M(?:{COUNT}D)?|{COUNT}D)"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": f"P(?:{DAYS}(?:T{CLOCK})?|T{CLOCK}|{COUNT}W)",
    "uuid": f"{HEX}{{8}}(?:-{HEX}{{4}}){{3}}-{HEX}{{12}}",
    "hostname": HOST,
    "email": rf"[a-zA-Z0-9_+-]{{1,20}}(?:\.[a-zA-Z0-9_+-]{{1,20}}){{0,2}}@{HOST}",
    "ipv4": rf"{BYTE}(?:\.{BYTE}){{3}}",
    "ipv6": f"{HEX}{{1,4}}(?::{HEX}{{1,4}}){{7}}",
    "uri": rf"(?:https?|ftp)://{HOST}(?::[1-9][0-9]{{0,3}})?(?:/[a-zA-Z0-9._~-]*)*"
    r"(?:\?[a-zA-Z0-9._~=&-]*)?(?:#[a-zA-Z0-9._~-]*)?",
}
"""Patterns of formats; each match is valid, but not every valid string matches."""


PATTERN = "pattern with look-around, back-references, \\b, flags"


def string(case: Case, counted: int | None = None) -> Piece:
    """Return the piece of a string for which all keywords of a case hold.

    Upper lengths above `counted` are omitted if it is given and only lengths constrain the string.
    """
    least, most = counts(case, "Length")
    if most is not None and most < least:
        return NOTHING
    found = forms(case)
    out = [value for schema in case for value in excluded(schema)[1] if isinstance(value, str)]
    if not (found or out):
        if counted is not None and most is not None and most > counted:
            most = None
        return quoted(Times(Leaf(read(LETTER)), least, most))
    if least or most is not None or not found:
        found.append(read(f"{LETTER}{{{least},{'' if most is None else most}}}"))
    dfa = reduce(intersection, found)
    return quoted(Leaf(difference(dfa, Dfa.among(map(written, out))) if out else dfa))


def forms(case: Case) -> list[Dfa]:
    """Return the automata of the formats and patterns of a case."""
    return [
        *(read(FORMATS[name]) for schema in case for name in formats(schema)),
        *(pattern(schema) for schema in case if "pattern" in schema.value),
    ]


def string_fits(value: str, case: Case) -> bool:
    """Return whether a listed string satisfies the keywords of a case."""
    least, most = counts(case, "Length")
    return least <= len(value) <= (len(value) if most is None else most) and all(
        accepted(dfa, written(value).encode()) for dfa in forms(case)
    )


def quoted(part: Piece) -> Piece:
    """Return a piece within quotes."""
    return Chain((Text('"'), part, Text('"')))


def written(value: str) -> str:
    """Return the characters of a string as JSON writes them between the quotes."""
    return json.dumps(value, ensure_ascii=False)[1:-1]


def formats(schema: Schema) -> list[str]:
    """Return the format of a schema as a list of at most one."""
    if "format" not in schema.value:
        return []
    name = need(schema.value["format"], str, f"format at {schema.at}")
    if name not in FORMATS:
        refuse(f"format {name!r}", schema.at, "any other format")
    return [name]


def pattern(schema: Schema, *, loose: bool = False) -> Dfa:
    """Return the automaton of strings that contain a match of the schema's pattern."""
    return found_in(need(schema.value["pattern"], str, f"pattern at {schema.at}"), schema.at, loose)


def found_in(text: str, at: str, loose: bool) -> Dfa:
    """Return the automaton of strings that contain a match of the pattern at a place.

    Raises:
        ValueError: as `search_dfa`, with the pattern and the place.
    """
    try:
        return searched(text, loose=loose)
    except Unsupported as error:
        raise Unsupported(f"pattern {text!r} at {at}: {error}; {INSTEAD[PATTERN]}") from error
    except TooLarge as error:
        raise TooLarge(f"pattern {text!r} at {at}: {error}") from error
    except ValueError as error:
        raise ValueError(f"pattern {text!r} at {at} is malformed: {error}") from error
