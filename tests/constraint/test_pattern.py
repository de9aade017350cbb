"""Compare automata of expressions and numbers with `re` and `decimal`."""

import re
from decimal import Decimal
from itertools import product
from math import prod
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from constrained import random_text
from outpace.constraint.dfa import Dfa, dfa_accepts
from outpace.constraint.numbers import DecimalBound, decimal_dfa, integer_dfa, integer_pattern
from outpace.constraint.pattern import SURROGATES, exclude_range, utf8_ranges
from outpace.constraint.strings import escaped_text, search_dfa

LETTERS = "abßKk\u212a\\ é1_x,S\n\U0001f600"
PATTERNS = (
    *("a|ab", "", "a*?b?", r"\d+", r"\w+\s\w+", "^(?:a|b)$", r"(?i)straße|K+", "é{2,3}", "(?s:.*)"),
    *("[^a-x]{1,3}", "(a+)+b", "(?:a?){6}a{6}", "(?:)|x", "a{,2}", "(?P<n>a)b", r"^x\Z"),
    *("(?a:\\w)*", "[\U0001f5ff-\U0001f601]?", ".", r"\S*|\W", "a(?i:b)a", "^a|b$"),
    "(?x: a b # c\n)",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_automaton_is_a_full_match(pattern: str) -> None:
    rng, dfa = Random(0), Dfa.from_pattern(pattern)
    texts = ["".join(rng.choices(LETTERS, k=rng.randint(0, 6))) for _ in range(300)]
    for text in ("", "a" * 12, *texts):
        assert dfa_accepts(dfa, text.encode()) == bool(re.fullmatch(pattern, text)), text


@given(low=st.integers(0, 0x10FFFF), size=st.integers(0, 5000))
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
    sizes = [prod(last - first + 1 for first, last in way) for way in ways]
    assert sum(sizes) == sum(last - first + 1 for first, last in spans)


@given(low=st.none() | st.integers(-300, 300), high=st.none() | st.integers(-300, 300))
def test_integers_between_bounds(low: int | None, high: int | None) -> None:
    match = re.compile(integer_pattern(low, high)).fullmatch
    for number in range(-1100, 1100):
        inside = (low is None or low <= number) and (high is None or number <= high)
        assert bool(match(str(number))) == inside
    assert re.fullmatch(integer_pattern(10**39, 10**40), str(10**39 + 5))
    assert not match("-0") and not match("007") and not match("")


DECIMALS = st.decimals(-40, 40, allow_nan=False, places=3) | st.sampled_from(
    [Decimal(text) for text in ("0", "-0.5", "0.25", "99.5", "-10", "0.001", "7")]
)
BOUNDS = st.none() | st.tuples(DECIMALS, st.booleans())


def inside(number: Decimal, low: DecimalBound | None, high: DecimalBound | None) -> bool:
    """Return whether a number is between bounds, each with whether it is exclusive."""
    return (low is None or (number > low[0] if low[1] else number >= low[0])) and (
        high is None or (number < high[0] if high[1] else number <= high[0])
    )


@given(low=BOUNDS, high=BOUNDS, number=DECIMALS, zeros=st.sampled_from(["", "0", "00"]))
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
        if text_found := random_text(dfa, rng):
            assert inside(Decimal(text_found.decode()), low, high)


@pytest.mark.parametrize(
    ("step", "accepts", "rejects"),
    [
        (7, ["0", "-7", "14", "700"], ["1", "15", "7.5", "07"]),
        (1000, ["0", "3000", "-1000"], ["100", "1500", "0.5"]),
    ],
)
def test_multiples(step: int, accepts: list[str], rejects: list[str]) -> None:
    dfa = integer_dfa(None, None, step)
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
    dfa = search_dfa(pattern)
    for text in found:
        assert dfa_accepts(dfa, escaped_text(text).encode()) and re.search(pattern, text)
    for text in missing:
        assert not dfa_accepts(dfa, escaped_text(text).encode()), text


@pytest.mark.parametrize("pattern", [r"\d", r"\D", r"\w\s", r"^[^\s]$", "^.$", "a$", r"[\d-]\W"])
def test_a_pattern_that_is_accepted_is_found_by_python(pattern: str) -> None:
    dfa, rng = search_dfa(pattern), Random(1)
    for _ in range(200):
        text = "".join(rng.choices("a1\uff11\u00e9 \n\ufeff\u2028-", k=rng.randint(0, 3)))
        assert dfa_accepts(dfa, escaped_text(text).encode()) <= bool(re.search(pattern, text)), text


def test_a_tree_of_texts_has_no_others() -> None:
    texts = ["", "a", "ab", "abc", "c\u00e9", "cc"]
    dfa = Dfa.from_texts(texts)
    every = ("".join(each) for n in range(5) for each in product("abc\u00e9", repeat=n))
    assert {text for text in every if dfa_accepts(dfa, text.encode())} == set(texts)
