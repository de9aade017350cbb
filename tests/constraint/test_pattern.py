"""Compare automata of expressions and schemas with `re`, `json` and `jsonschema`."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.constraint.charset import SURROGATES, exclude_range, utf8_ranges
from outpace.constraint.dfa import Dfa
from outpace.constraint.integers import integer_pattern
from outpace.constraint.keywords import KEYWORD_ALTERNATIVES
from outpace.constraint.pattern import TooLargeError, UnsupportedError
from outpace.constraint.schema import schema_dfa

LETTERS = "abßKk\u212a\\ é1_x,S\n\U0001f600"
PATTERNS = (
    *("a|ab", "", "a*?b?", r"\d+", r"\w+\s\w+", "^(?:a|b)$", r"(?i)straße|K+", "é{2,3}", "(?s:.*)"),
    *(
        "[^a-x]{1,3}",
        "(a+)+b",
        "(?:a?){6}a{6}",
        "(?:)|x",
        "a{,2}",
        "(?P<n>a)b",
        r"^x\Z",
        "(?a:\\w)*",
    ),
    *("[\U0001f5ff-\U0001f601]?", ".", r"\S*|\W", "a(?i:b)a", "^a|b$", "(?x: a b # c\n)"),
)


def accepts(dfa: Dfa, text: bytes) -> bool:
    """Return whether an automaton accepts a text."""
    state = 0
    for byte in text:
        state = int(dfa.table[state, byte])
        if state < 0:
            return False
    return bool(dfa.accepts[state])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_automaton_is_a_full_match(pattern: str) -> None:
    rng, dfa = Random(0), Dfa.from_pattern(pattern)
    texts = [
        "",
        "a" * 12,
        *("".join(rng.choices(LETTERS, k=rng.randint(0, 6))) for _ in range(400)),
    ]
    for text in texts:
        assert accepts(dfa, text.encode()) == bool(re.fullmatch(pattern, text)), text


@given(low=st.integers(0, 0x10FFFF), size=st.integers(0, 5000))
@settings(max_examples=100, deadline=None)
def test_spans_of_characters_are_their_bytes(low: int, size: int) -> None:
    spans = list(exclude_range([(low, min(low + size, 0x10FFFF))], SURROGATES))
    ways = [way for span in spans for way in utf8_ranges(*span)]
    for span in spans:
        for code in {*span, sum(span) // 2}:
            pairs = chr(code).encode()
            fits = [
                len(way) == len(pairs)
                and all(a <= b <= c for b, (a, c) in zip(pairs, way, strict=True))
                for way in ways
            ]
            assert sum(fits) == 1
    sizes = []
    for way in ways:
        product = 1
        for first, last in way:
            product *= last - first + 1
        sizes.append(product)
    assert sum(sizes) == sum(last - first + 1 for first, last in spans)


@given(low=st.none() | st.integers(-300, 300), high=st.none() | st.integers(-300, 300))
@settings(max_examples=200, deadline=None)
def test_integers_between_bounds(low: int | None, high: int | None) -> None:
    match = re.compile(integer_pattern(low, high)).fullmatch
    for number in range(-1100, 1100):
        inside = (low is None or low <= number) and (high is None or number <= high)
        assert bool(match(str(number))) == inside
    assert re.fullmatch(integer_pattern(10**39, 10**40), str(10**39 + 5))
    assert not match("-0") and not match("007") and not match("")


def sampled(dfa: Dfa, rng: Random) -> bytes | None:
    """Return a text that an automaton accepts, or None if none was found in time."""
    state, text = 0, bytearray()
    for _ in range(3000):
        after = [byte for byte in range(256) if dfa.table[state, byte] >= 0]
        if dfa.accepts[state] and (not after or rng.random() < 0.3):
            return bytes(text)
        text.append(rng.choice(after))
        state = int(dfa.table[state, text[-1]])
    return None


NODE = {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}, "v": {"type": "null"}}}
SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}, "required": ["a"]},
    {"type": "integer", "exclusiveMinimum": 3.5, "maximum": 1e3},
    {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
    {"type": "string", "pattern": "^a.+[^x]$"},
    {"type": "array", "items": {"type": "string", "pattern": "^(a|b){2}$|^c"}, "minItems": 1},
    {"oneOf": [{"type": "string"}, {"type": "integer", "minimum": -5}]},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]},
    {},
    {"type": ["number", "null"], "minimum": 0},
    {"type": "array", "prefixItems": [{"type": "null"}, {"const": [1, {"a": 'b"c'}]}]},
    {"enum": [1, "a.b", None, 2.5, "é\n"], "type": ["string", "number"]},
    {"type": "object", "properties": {'a.b"c': {"type": "null"}, "é": {"const": "k"}}},
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["z", "a"]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "string", "minLength": 2, "maxLength": 4},
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid")),
    {"allOf": [{"items": {"$ref": "#"}, "maxItems": 2}]},
    {"properties": {"a": {"maxLength": 2}, "b": {"type": "null"}, "c": True}, "required": ["b"]},
)


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_accepted_texts_are_valid(schema: Any) -> None:
    rng, found = Random(0), 0
    dfa = schema_dfa(schema)
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    check = jsonschema.Draft202012Validator(schema, format_checker=formats)
    for _ in range(60):
        if (text := sampled(dfa, rng)) is not None:
            check.validate(json.loads(text))
            found += 1
    assert found > 10


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"not": {"minLength": 1}}, "not at # is"),
        ({"type": "object", "not": {"enum": [{"a": 1}]}}, "not at # is"),
        ({"type": "number", "not": {"type": "integer"}}, "not at # is"),
        ({"items": {"uniqueItems": True}}, "uniqueItems at #/items is"),
        ({"properties": {"a": {"multipleOf": 0.01}}}, "multipleOf 0.01 at #/properties/a is"),
        ({"allOf": [{"multipleOf": 97}, {"multipleOf": 101}]}, "multipleOf 101 at #/allOf/1 is"),
        ({"minimum": 1e-30}, "minimum 1e-30 at # is"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf at # is"),
        ({"oneOf": [{"minimum": 0}, {"minLength": 1}]}, "oneOf at # is"),
        ({"$ref": "http://x"}, "$ref to 'http://x' at # is"),
        ({"items": {"$ref": "#a"}}, "$ref to '#a' at #/items is"),
        ({"type": "string", "format": "regex"}, "format 'regex' at # is"),
        ({"type": "string", "pattern": r"(a)\1"}, "pattern '(a)\\\\1' at #: a back-reference is"),
        ({"pattern": "(?i)^abc$"}, "pattern '(?i)^abc$' at #: a flag such as (?i) is not"),
        ({"pattern": "a(?i:b)"}, "pattern 'a(?i:b)' at #: a flag such as (?i) is not"),
        ({"pattern": r"a\Z"}, "pattern 'a\\\\Z' at #: \\Z is not part of ECMA 262"),
        ({"pattern": "a{,2}"}, "pattern 'a{,2}' at #: {,n} is not part of ECMA 262"),
        (
            {"patternProperties": {"(?=a)": {}}},
            "pattern '(?=a)' at #/patternProperties: look-around",
        ),
        ({"minProperties": 2}, "minProperties at # is"),
        ({"enum": [[1]], "minItems": 1}, "minItems next to a listed array at # is"),
        ({"patternProperties": {c: {} for c in "abcde"}}, "patternProperties at # is"),
    ],
    ids=str,
)
def test_unsupported_keywords_are_named(schema: Any, what: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(what)) as caught:
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
        (lambda schema: {"patternProperties": {"a": schema}}, "#/patternProperties/a"),
        (lambda schema: {"additionalProperties": schema}, "#/additionalProperties"),
        (lambda schema: {"allOf": [{"propertyNames": schema}]}, "#/allOf/0/propertyNames"),
        (lambda schema: {"prefixItems": [{}, schema]}, "#/prefixItems/1"),
    ],
    ids=["root", "branch", "property", "definition", "pattern", "others", "names", "item"],
)
def test_other_keywords_are_refused_by_name(name: str, inside: Any, at: str) -> None:
    with pytest.raises(
        UnsupportedError, match=f"^{re.escape(f'{name} at {at} is not supported: ')}"
    ):
        schema_dfa(inside({name: {}}))


def test_the_table_of_the_documentation_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "constraints.md").read_text()
    (table,) = re.findall(r"\| not supported \| instead \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    rows = [re.split(r" ?(?<!\\)\| ?", line) for line in table.replace("`", "").splitlines()]
    assert [tuple(row[1:3]) for row in rows] == [
        (what, instead.replace("|", r"\|")) for what, instead in KEYWORD_ALTERNATIVES.items()
    ]


def test_many_small_variants_are_too_large() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(6):
        schema = {"type": "object", "properties": dict.fromkeys("abcdefgh", schema)}
    with pytest.raises(TooLargeError, match="has more than 20000 values"):
        schema_dfa(schema)


def test_a_tree_of_texts_has_no_others() -> None:
    texts = ["", "a", "ab", "abc", "c\u00e9", "cc"]
    dfa = Dfa.from_texts(texts)
    every = ("".join(each) for n in range(5) for each in product("abc\u00e9", repeat=n))
    assert {text for text in every if accepts(dfa, text.encode())} == set(texts)


def test_ambiguous_sets_are_accepted(
    recwarn: pytest.WarningsRecorder,
) -> None:
    assert Dfa.from_pattern("[[a]b]").accepts.any()
    schema = {"type": "string", "pattern": "[a||b]"}
    assert schema_dfa(schema).accepts.any()
    assert not recwarn.list
