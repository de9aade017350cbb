"""Test schemas of random keywords: accepted texts are valid, or a keyword is refused."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from outpace.constraint.algebra import dfa_accepts
from outpace.constraint.decimals import DecimalBound, decimal_dfa
from outpace.constraint.dfa import Dfa
from outpace.constraint.ecma import search_dfa
from outpace.constraint.keywords import TYPE_KEYWORDS
from outpace.constraint.pattern import TooLargeError, UnsupportedError
from outpace.constraint.schema import schema_dfa
from outpace.constraint.strings import escaped_text

COUNTS = st.integers(0, 4)
NUMBERS = st.sampled_from(
    [-3, -1.5, -1, -0.25, 0, 0.0, 0.1, 0.5, 1, 1.0, 2, 2.75, 3, 10, 99.5, 1e3]
)
NAMES = st.sampled_from(["a", "b", "ab", "x1", "\u00e9", 'q"', "\u0663"])
PATTERNS = st.sampled_from(
    ["^a", "b$", r"\d", r"^\w+$", r"^[^\s]{1,2}$", "", "^$", "a|^b", "(a|b)c?", r"\D", '"', r"\S\s"]
)
FORMATS = ("date", "time", "date-time", "uuid", "email", "hostname", "ipv4", "ipv6", "duration")
SCALARS = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.sampled_from(["", "a", "ab", "x1", "b\n", "\u00e9"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)


def keywords(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Return the values of each keyword, given nested schemas."""
    finite = st.one_of(
        st.fixed_dictionaries({"enum": st.lists(SCALARS, max_size=3)}),
        st.fixed_dictionaries({"const": SCALARS}),
        st.fixed_dictionaries({"type": st.sampled_from([*TYPE_KEYWORDS])}),
    )
    few = st.lists(inner, min_size=1, max_size=2)
    by_name = st.dictionaries(NAMES, inner, max_size=3)
    return {
        "type": st.sampled_from([*TYPE_KEYWORDS])
        | st.lists(st.sampled_from([*TYPE_KEYWORDS]), min_size=1, max_size=3, unique=True),
        "enum": st.lists(VALUES, max_size=4),
        "const": VALUES,
        "not": finite,
        "allOf": few,
        "anyOf": few,
        "oneOf": few,
        "$ref": st.sampled_from(["#/$defs/one", "#/$defs/two"]),
        "minLength": COUNTS,
        "maxLength": COUNTS,
        "pattern": PATTERNS,
        "format": st.sampled_from(FORMATS),
        "minimum": NUMBERS,
        "maximum": NUMBERS,
        "exclusiveMinimum": NUMBERS,
        "exclusiveMaximum": NUMBERS,
        "multipleOf": st.sampled_from([1, 2, 3, 7, 10, 0.5, 0.25, 1.5, 5.0]),
        "items": inner,
        "prefixItems": few,
        "minItems": COUNTS,
        "maxItems": COUNTS,
        "uniqueItems": st.booleans(),
        "properties": by_name,
        "required": st.lists(NAMES, max_size=2),
        "additionalProperties": inner,
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "propertyNames": inner,
        "minProperties": st.integers(0, 2),
        "maxProperties": COUNTS,
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2), max_size=2),
    }


def extended(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Generate schemas of a few keywords, of one type or any."""
    known = keywords(inner)

    def of(names: list[str]) -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries({name: known[name] for name in names})

    typed = [
        st.lists(st.sampled_from(sorted(words)), max_size=4, unique=True)
        .flatmap(of)
        .map(lambda found, kind=kind: {"type": kind, **found})
        for kind, words in TYPE_KEYWORDS.items()
        if words
    ]
    mixed = st.lists(st.sampled_from([*known]), max_size=4, unique=True).flatmap(of)
    return st.one_of(*typed, mixed)


SCHEMAS = st.recursive(st.booleans() | st.just({}) | extended(st.just({})), extended, max_leaves=6)
ROOTS = st.builds(
    lambda schema, one, two: {**schema, "$defs": {"one": one, "two": two}},
    SCHEMAS.filter(lambda schema: isinstance(schema, dict)),
    extended(st.just({})),
    extended(st.just({"$ref": "#/$defs/one"})),
)


def walked(dfa: Dfa, rng: Random) -> bytes | None:
    """Return a random accepted text, or None if none was found in time."""
    state, text, ways = 0, bytearray(), dict[int, list[int]]()
    for _ in range(600):
        if state not in ways:
            ways[state] = (dfa.table[state] >= 0).nonzero()[0].tolist()
        if dfa.accepts[state] and (not ways[state] or rng.random() < 0.3):
            return bytes(text)
        text.append(rng.choice(ways[state]))
        if rng.random() < 0.4 and (ends := [b for b in ways[state] if chr(b) in '"]}']):
            text[-1] = rng.choice(ends)
        state = int(dfa.table[state, text[-1]])
    return None


def check_white_space(text: str) -> None:
    """Assert that there is at most one space, after a comma or colon."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    assert not re.search(r"[\t\r\n]|(?<![,:]) ", bare), text


def check_schema(schema: Any, seed: int, count: int = 8) -> None:
    """Assert that accepted texts are valid, or that the refused keyword occurs."""
    try:
        dfa = schema_dfa(schema)
    except UnsupportedError as error:
        event("unsupported")
        name = re.match(r"(\S+) (?:.* )?at #", str(error))
        assert name and f'"{name[1]}"' in json.dumps(schema), error
        return
    except TooLargeError:
        event("too large")
        return
    except ValueError as error:
        assert str(error) == "no text matches it"
        event("empty")
        return
    rng = Random(seed)
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    check = jsonschema.Draft202012Validator(schema, format_checker=formats)
    for _ in range(count):
        if (text := walked(dfa, rng)) is not None:
            check_white_space(text.decode())
            errors = [error.message for error in check.iter_errors(json.loads(text))]
            assert not errors, (schema, text)
    event("held")


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


ANY = given(schema=ROOTS, seed=st.integers(0, 99))


@ANY
@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
def test_any_schema_is_followed_or_refused(schema: Any, seed: int) -> None:
    check_schema(schema, seed)


@pytest.mark.nightly
@ANY
@settings(max_examples=10_000, deadline=None, suppress_health_check=SLOW)
def test_many_schemas_are_followed_or_refused(schema: Any, seed: int) -> None:
    check_schema(schema, seed)


DECIMALS = st.decimals(-40, 40, allow_nan=False, places=3) | st.sampled_from(
    [Decimal(text) for text in ("0", "-0.5", "0.25", "99.5", "-10", "0.001", "7")]
)
BOUNDS = st.none() | st.tuples(DECIMALS, st.booleans())


def inside(number: Decimal, low: DecimalBound | None, high: DecimalBound | None) -> bool:
    """Return whether a number is between bounds."""
    return (low is None or (number > low[0] if low[1] else number >= low[0])) and (
        high is None or (number < high[0] if high[1] else number <= high[0])
    )


@given(low=BOUNDS, high=BOUNDS, number=DECIMALS, zeros=st.sampled_from(["", "0", "00"]))
@settings(max_examples=40, deadline=None)
def test_numbers_between_bounds(
    low: DecimalBound | None, high: DecimalBound | None, number: Decimal, zeros: str
) -> None:
    dfa, rng = decimal_dfa(low, high), Random(0)
    near = [bound[0] + Decimal(n) / 1000 for bound in (low, high) if bound for n in (-1, 0, 1)]
    for each in (number, *near):
        text = f"{each or abs(each):f}"
        text += zeros if "." in text else ""
        assert dfa_accepts(dfa, text.encode()) == inside(each, low, high), text
    for _ in range(10 if len(dfa.table) else 0):
        if text_found := walked(dfa, rng):
            assert inside(Decimal(text_found.decode()), low, high)


@pytest.mark.parametrize(
    ("step", "accepts", "rejects"),
    [
        ("7", ["0", "-7", "14", "700"], ["1", "15", "7.5", "07"]),
        ("0.25", ["0", "0.5", "-1.25", "3.50", "2"], ["0.1", "0.250", "1.26"]),
        ("1.5", ["0", "1.5", "3", "-4.5", "3.0"], ["1", "2.5", "1.50"]),
        ("1000", ["0", "3000", "-1000"], ["100", "1500", "0.5"]),
    ],
)
def test_multiples(step: str, accepts: list[str], rejects: list[str]) -> None:
    dfa = decimal_dfa(None, None, (Decimal(step),))
    assert [text for text in accepts if not dfa_accepts(dfa, text.encode())] == []
    assert [text for text in rejects if dfa_accepts(dfa, text.encode())] == []


@pytest.mark.parametrize(
    ("pattern", "found", "missing"),
    [
        ("^S_", ["S_", "S_x"], ["xS_", "S"]),
        ("a|^b", ["xax", "bx"], ["xb", "c"]),
        ("", ["", "x"], []),
        ("^$", [""], ["x"]),
        ("$", ["", "x"], []),
        ("^", ["", "x"], []),
        ("(|a)b", ["b", "xabx"], ["a"]),
        ("(^a|b)", ["ax", "xb"], ["xa"]),
        (r"^\d+$", ["12"], ["\uff11", "1\n", ""]),
        (r"^\D$", ["x"], ["1", "\uff11"]),
        (r"^\w$", ["_", "Z"], ["\u00e9", "-"]),
        (r"^\W$", ["-"], ["\u00e9", "a"]),
        (r"^\s$", [" ", "\t", "\n"], ["\ufeff", "x"]),
        (r"^\S$", ["x", "\u00e9"], [" ", "\ufeff", "\u00a0"]),
        ("^.$", ["x", "\u00e9", '"', "\\"], ["\n", "\r", "\u2028"]),
        ('^["\\\\]$', ['"', "\\"], ["x"]),
    ],
)
def test_patterns_are_found_as_in_ecma_262(
    pattern: str, found: list[str], missing: list[str]
) -> None:
    dfa, loose = search_dfa(pattern), search_dfa(pattern, loose=True)
    for text in found:
        assert dfa_accepts(dfa, escaped_text(text).encode()) and re.search(pattern, text)
        assert dfa_accepts(loose, escaped_text(text).encode())
    for text in missing:
        assert not dfa_accepts(dfa, escaped_text(text).encode()), text


@pytest.mark.parametrize("pattern", [r"\d", r"\D", r"\w\s", r"^[^\s]$", "^.$", "a$", r"[\d-]\W"])
def test_a_loose_pattern_accepts_either_dialect(pattern: str) -> None:
    strict, loose, rng = search_dfa(pattern), search_dfa(pattern, loose=True), Random(1)
    for _ in range(600):
        text = "".join(rng.choices("a1\uff11\u00e9 \n\ufeff\u2028-", k=rng.randint(0, 3)))
        code, match = escaped_text(text).encode(), bool(re.search(pattern, text))
        assert dfa_accepts(strict, code) <= match <= dfa_accepts(loose, code), text


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"enum": [1], "const": 1.0}, {"1"}),
        ({"enum": [{"b": 2, "a": 1}, 3], "const": {"a": 1.0, "b": 2}}, {'{"b":2,"a":1}'}),
        ({"enum": [1, True, "1"], "const": True}, {"true"}),
        ({"enum": [1, 2.0, 3.5], "type": "integer", "minimum": 2}, {"2.0"}),
        ({"enum": ["a", "ab", "abc"], "maxLength": 2, "not": {"const": "a"}}, {'"ab"'}),
        ({"const": "\u0000", "minLength": 1}, {'"\\u0000"'}),
        ({"type": ["null", "boolean"], "not": {"enum": [False]}}, {"null", "true"}),
    ],
)
def test_listed_values_are_compared_by_value(schema: Any, texts: set[str]) -> None:
    dfa, rng = schema_dfa(schema), Random(0)
    found = {
        json.dumps(json.loads(walked(dfa, rng) or b""), separators=(",", ":")) for _ in range(60)
    }
    assert found == texts
