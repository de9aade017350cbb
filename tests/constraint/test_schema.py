"""Test automata of schemas: accepted texts are valid, or a keyword is refused by its name."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from constrained import SCHEMAS, random_text
from outpace.constraint.dfa import dfa_accepts
from outpace.constraint.keywords import KEYWORD_ALTERNATIVES, TYPE_KEYWORDS
from outpace.constraint.pattern import TooLargeError, UnsupportedError
from outpace.constraint.schema import schema_dfa

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


def keywords(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Return the values of each keyword, given nested schemas."""
    few = st.lists(inner, min_size=1, max_size=2)
    by_name = st.dictionaries(NAMES, inner, max_size=3)
    return {
        "type": st.sampled_from([*TYPE_KEYWORDS])
        | st.lists(st.sampled_from([*TYPE_KEYWORDS]), min_size=1, max_size=3, unique=True),
        "enum": st.lists(SCALARS, max_size=4),
        "const": SCALARS,
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
        "multipleOf": st.sampled_from([1, 2, 3, 7, 10, 0.5, 5.0]),
        "items": inner,
        "prefixItems": few,
        "minItems": COUNTS,
        "maxItems": COUNTS,
        "properties": by_name,
        "required": st.lists(NAMES, max_size=2),
        "additionalProperties": inner,
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


RANDOM = st.recursive(st.booleans() | st.just({}) | extended(st.just({})), extended, max_leaves=6)
ROOTS = st.builds(
    lambda schema, one, two: {**schema, "$defs": {"one": one, "two": two}},
    RANDOM.filter(lambda schema: isinstance(schema, dict)),
    extended(st.just({})),
    extended(st.just({"$ref": "#/$defs/one"})),
)


def check_white_space(text: str) -> None:
    """Assert that there is at most one space, after a comma or colon."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    assert not re.search(r"[\t\r\n]|(?<![,:]) ", bare), text


def check_schema(schema: Any, seed: int, count: int = 8) -> int:
    """Assert that accepted texts are valid, or that the refused keyword occurs.

    Returns the number of texts that were found.
    """
    try:
        dfa = schema_dfa(schema)
    except UnsupportedError as error:
        name = re.match(r"(\S+) (?:.* )?at #", str(error))
        assert name and f'"{name[1]}"' in json.dumps(schema), error
        return 0
    except ValueError:  # too large, or no text matches
        return 0
    rng, found = Random(seed), 0
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    check = jsonschema.Draft202012Validator(schema, format_checker=formats)
    for _ in range(count):
        if (text := random_text(dfa, rng)) is not None:
            check_white_space(text.decode())
            errors = [error.message for error in check.iter_errors(json.loads(text))]
            assert not errors, (schema, text)
            found += 1
    return found


@given(schema=ROOTS, seed=st.integers(0, 99))
@settings(suppress_health_check=[*HealthCheck])
def test_any_schema_is_followed_or_refused(schema: Any, seed: int) -> None:
    check_schema(schema, seed)


@pytest.mark.nightly
@given(schema=ROOTS, seed=st.integers(0, 99))
@settings(max_examples=5000, suppress_health_check=[*HealthCheck])
def test_many_schemas_are_followed_or_refused(schema: Any, seed: int) -> None:
    check_schema(schema, seed)


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_typical_schemas_are_followed(schema: Any) -> None:
    assert check_schema(schema, 0, 15) > 0


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"),
    [
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc", '\\\n"'], ["a", "abcd"]),
        ({"type": "integer", "minimum": 3, "maximum": 20}, [3, 20], [2, 21]),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 20}, [4, 19], [3, 20]),
        ({"type": "number", "minimum": -0.5, "maximum": 1.5}, [-0.5, 1.5], [-0.6, 1.51]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.1, 0.99], [0, 1]),
        (
            {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
            [[None], [None] * 2],
            [[], [None] * 3],
        ),
        (
            {"type": "object", "properties": {"a": {"const": 1}, "b": {}}, "required": ["a"]},
            [{"a": 1}, {"a": 1, "b": [2]}, {"a": 1, "b": {"c": "\t"}}],
            [{}, {"b": 2}, {"a": 2}],
        ),
    ],
    ids=str,
)
def test_bounds_are_exact(schema: Any, accepted: list[Any], rejected: list[Any]) -> None:
    dfa = schema_dfa(schema)
    for value in accepted:
        assert dfa_accepts(dfa, json.dumps(value).encode()), value
    for value in rejected:
        assert not dfa_accepts(dfa, json.dumps(value).encode()), value


@pytest.mark.parametrize(
    ("schema", "what", "at"),
    [
        ({"properties": {"a": {"multipleOf": 0.01}}}, "multipleOf 0.01", "#/properties/a"),
        ({"allOf": [{"multipleOf": 97}, {"multipleOf": 101}]}, "multipleOf 101", "#/allOf/1"),
        ({"minimum": 1e-30}, "minimum 1e-30", "#"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", "#"),
        ({"oneOf": [{"minimum": 0}, {"minLength": 1}]}, "oneOf", "#"),
        ({"$ref": "http://x"}, "$ref to 'http://x'", "#"),
        ({"items": {"$ref": "#a"}}, "$ref to '#a'", "#/items"),
        ({"type": "string", "format": "regex"}, "format 'regex'", "#"),
        ({"type": "string", "pattern": r"(a)\1"}, r"pattern '(a)\\1'", "#"),
        ({"pattern": "(?i)^abc$"}, "pattern '(?i)^abc$'", "#"),
        ({"pattern": "a(?i:b)"}, "pattern 'a(?i:b)'", "#"),
        ({"pattern": r"a\Z"}, r"pattern 'a\\Z'", "#"),
        ({"pattern": "a{,2}"}, "pattern 'a{,2}'", "#"),
        ({"enum": [1, [1]]}, "enum", "#"),
        ({"const": {}}, "const", "#"),
    ],
    ids=str,
)
def test_unsupported_keywords_are_named(schema: Any, what: str, at: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{re.escape(what)} .*?at {at}[ :]") as caught:
        schema_dfa(schema)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [*KEYWORD_ALTERNATIVES, "x-guidance", "minimun"])
@pytest.mark.parametrize(
    ("inside", "at"),
    [
        (lambda schema: schema, "#"),
        (lambda schema: {"anyOf": [{"type": "null"}, schema]}, "#/anyOf/1"),
        (lambda schema: {"properties": {"a": {"items": schema}}}, "#/properties/a/items"),
        (lambda schema: {"$ref": "#/$defs/x", "$defs": {"x": schema}}, "#/$defs/x"),
        (lambda schema: {"additionalProperties": schema}, "#/additionalProperties"),
        (lambda schema: {"allOf": [{"items": schema}]}, "#/allOf/0/items"),
        (lambda schema: {"prefixItems": [{}, schema]}, "#/prefixItems/1"),
    ],
    ids=["root", "branch", "property", "definition", "others", "both", "item"],
)
def test_other_keywords_are_refused_by_name(name: str, inside: Any, at: str) -> None:
    with pytest.raises(UnsupportedError, match="^" + re.escape(f"{name} at {at} ")):
        schema_dfa(inside({name: {}}))


def test_many_small_variants_are_too_large() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(6):
        schema = {"type": "object", "properties": dict.fromkeys("abcdefgh", schema)}
    with pytest.raises(TooLargeError, match="20000"):
        schema_dfa(schema)


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"enum": [1], "const": 1.0}, {"1"}),
        ({"enum": [1, True, "1"], "const": True}, {"true"}),
        ({"enum": [1, 2.0, 3.5], "type": "integer", "minimum": 2}, {"2.0"}),
        ({"enum": ["a", "ab", "abc"], "maxLength": 1}, {'"a"'}),
        ({"const": "\u0000", "minLength": 1}, {'"\\u0000"'}),
    ],
)
def test_listed_values_are_compared_by_value(schema: Any, texts: set[str]) -> None:
    dfa, rng = schema_dfa(schema), Random(0)
    found = {
        json.dumps(json.loads(random_text(dfa, rng) or b""), separators=(",", ":"))
        for _ in range(60)
    }
    assert found == texts
