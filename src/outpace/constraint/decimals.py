"""JSON numbers within bounds, as automata over their text."""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache
from itertools import pairwise
from math import lcm

import numpy as np

from outpace.constraint.algebra import intersect_dfas, minimize_dfa
from outpace.constraint.dfa import Dfa, determinize_nfa
from outpace.constraint.integers import (
    NO_MATCH_PATTERN,
    integer_pattern,
    max_integer_digits,
    natural_patterns,
)
from outpace.constraint.pattern import pattern_nfa

DecimalBound = tuple[Decimal, bool]
"""A number, and whether it is excluded itself."""

DECIMAL_DIGITS = 15
"""Maximum digits of a number with a fraction: those a double distinguishes, so that rounding keeps
it on the same side of a bound."""

NATURAL = "(?:0|[1-9][0-9]*)"
NONZERO = "[0-9]*[1-9][0-9]*"
FRACTION = r"(?:\.[0-9]+)?"
EXPONENT = "(?:[eE][+-]?[0-9]{1,2})?"
"""Allowed where there is no bound."""


@lru_cache(256)
def integer_dfa(low: int | None, high: int | None, steps: tuple[Decimal, ...] = ()) -> Dfa:
    """Return the automaton of integers from `low` to `high` that are multiples of all `steps`."""
    if not steps:  # remainders and digit counts together need too many states
        most = 10 ** max_integer_digits(low, high) - 1
        low, high = -most if low is None else low, most if high is None else high
    return keep_multiples(pattern_dfa(integer_pattern(low, high)), steps)


@lru_cache(256)
def decimal_dfa(
    low: DecimalBound | None, high: DecimalBound | None, steps: tuple[Decimal, ...] = ()
) -> Dfa:
    """Return the automaton of decimals between two bounds that are multiples of all `steps`."""
    bounds = [bound[0] for bound in (low, high) if bound is not None]
    dfa = minimize_dfa(pattern_dfa(number_pattern(bounds) + ("" if bounds or steps else EXPONENT)))
    if low is not None:
        dfa = intersect_dfas(dfa, pattern_dfa(at_least_pattern(*low)))
    if high is not None:
        dfa = intersect_dfas(dfa, pattern_dfa(at_most_pattern(*high)))
    return keep_multiples(dfa, steps)


def equal_number_dfa(number: Decimal) -> Dfa:
    """Return the automaton of all spellings of one number without an exponent."""
    if not number:
        return pattern_dfa(r"-?0(?:\.0+)?")
    return intersect_dfas(
        pattern_dfa(at_least_pattern(number, False)), pattern_dfa(at_most_pattern(number, False))
    )


@lru_cache(256)
def pattern_dfa(pattern: str) -> Dfa:
    """Return the automaton of a regular expression; it may have no states."""
    return determinize_nfa(pattern_nfa(pattern))


def keep_multiples(dfa: Dfa, steps: tuple[Decimal, ...]) -> Dfa:
    """Restrict an automaton of numbers to multiples of all `steps`."""
    return minimize_dfa(intersect_dfas(dfa, multiples_dfa(steps)) if steps else dfa)


def number_pattern(bounds: list[Decimal]) -> str:
    """Return the spelling of numbers that may be between some bounds."""
    digits = max_integer_digits(*map(int, bounds))
    zeros = max([0, *(-bound.adjusted() for bound in bounds if bound)])
    parts = [
        f"(?:0|[1-9][0-9]{{0,{digits - 1}}})",
        rf"0\.0{{0,{zeros}}}[0-9]{{1,{DECIMAL_DIGITS}}}",
    ]
    for front in range(1, DECIMAL_DIGITS):
        parts.append(rf"[1-9][0-9]{{{front - 1}}}\.[0-9]{{1,{DECIMAL_DIGITS - front}}}")
    return f"-?(?:{'|'.join(parts)})"


def at_least_pattern(bound: Decimal, strict: bool) -> str:
    """Return the pattern of numbers from a bound, or if `strict` above it; -0 is excluded."""
    if bound < 0:
        return f"{NATURAL}{FRACTION}|-(?:{unsigned_below(-bound, strict)})"
    return unsigned_above(bound, strict)


def at_most_pattern(bound: Decimal, strict: bool) -> str:
    """Return the pattern of numbers up to a bound, or if `strict` below it."""
    if bound <= 0:
        more = "" if strict or bound else r"|-?0(?:\.0+)?"
        return f"-(?:{unsigned_above(-bound, strict)}){more}"
    return f"-(?:{NATURAL}{FRACTION})|{unsigned_below(bound, strict)}"


def unsigned_above(bound: Decimal, strict: bool) -> str:
    """Return the pattern of unsigned numbers from a bound, or if `strict` above it."""
    front, rest = split_decimal(bound)
    equal = rf"\.{NONZERO}" if strict else FRACTION
    same = rf"\.{fraction_above(rest, strict)}" if rest else equal
    return f"(?:{'|'.join(natural_patterns(front + 1, None))}){FRACTION}|{front}{same}"


def unsigned_below(bound: Decimal, strict: bool) -> str:
    """Return the pattern of unsigned numbers up to a bound, or if `strict` below it."""
    front, rest = split_decimal(bound)
    parts = [f"(?:{'|'.join(natural_patterns(0, front - 1))}){FRACTION}"] if front else []
    if rest:
        parts.append(rf"{front}(?:\.{fraction_below(rest, strict)})?")
    elif not strict:
        parts.append(rf"{front}(?:\.0+)?")
    return "|".join(parts) or NO_MATCH_PATTERN


def split_decimal(number: Decimal) -> tuple[int, str]:
    """Return the integer part of a number, and its fraction digits without trailing zeros."""
    front, _, rest = f"{number:f}".partition(".")
    return int(front), rest.rstrip("0")


def fraction_above(rest: str, strict: bool) -> str:
    """Return the pattern of fraction digits that are at least others, or if `strict` above."""
    if not rest:
        return NONZERO if strict else "[0-9]*"
    digit = int(rest[0])
    above = f"[{digit + 1}-9][0-9]*|" if digit < 9 else ""
    return f"(?:{above}{digit}{fraction_above(rest[1:], strict)})"


def fraction_below(rest: str, strict: bool) -> str:
    """Return the pattern of one or more fraction digits up to others, or if `strict` below them."""
    digit = int(rest[0])
    below = f"[0-{digit - 1}][0-9]*|" if digit else ""
    if len(rest) > 1:
        return f"(?:{below}{digit}(?:{fraction_below(rest[1:], strict)})?)"
    return f"(?:{below}{NO_MATCH_PATTERN if strict else f'{digit}0*'})"


def common_multiple(steps: tuple[Decimal, ...]) -> tuple[int, int]:
    """Return the fraction digits that multiples of all `steps` need, and their common multiple."""
    places = max(max(0, -int(step.as_tuple().exponent)) for step in steps)
    return places, lcm(*(int(step.scaleb(places)) for step in steps))


def multiples_dfa(steps: tuple[Decimal, ...]) -> Dfa:
    """Return the automaton of decimals that are multiples of all `steps`, by remainder.

    A fraction has at most as many digits as those of the steps.
    """
    places, size = common_multiple(steps)
    table = np.full((2 + size * (places + 2), 256), -1, dtype=np.int32)
    digits = slice(ord("0"), ord("9") + 1)
    table[0, ord("-")] = 1
    table[:2, digits] = 2 + np.arange(10) % size
    remainders = np.arange(size)
    after = (10 * remainders[:, None] + np.arange(10)) % size
    whole, *fractions = (2 + size * layer + remainders for layer in range(places + 2))
    table[whole, digits] = whole[0] + after
    table[whole, ord(".")] = fractions[0]
    for own, longer in pairwise(fractions):
        table[own, digits] = longer[0] + after
    left = [places, *range(places, -1, -1)]
    accepts = [remainders * 10**count % size == 0 for count in left]
    return minimize_dfa(Dfa(table, np.concatenate([np.zeros(2, dtype=bool), *accepts])))
