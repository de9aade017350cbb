"""Numbers of JSON schemas, as pieces of a string."""

from __future__ import annotations

from decimal import Decimal
from math import ceil, floor, lcm

import numpy as np

from outpace.constraint.dfa import (
    Dfa,
    StepBudget,
    determinize_nfa,
    intersect_dfas,
    keep_dfas,
    minimize_dfa,
)
from outpace.constraint.keywords import SchemaCase, SubSchema, refuse_keyword, require_type
from outpace.constraint.pattern import pattern_nfa
from outpace.constraint.pieces import DfaPiece, JsonPiece

NO_MATCH_PATTERN = r"[^\s\S]"

DEFAULT_INTEGER_DIGITS = 20
"""Maximum digits unless a bound has more: those of 64 bits."""


def max_integer_digits(*bounds: int | None) -> int:
    """Return the maximum digits of numbers within some bounds: one more than the bounds have."""
    return max(
        DEFAULT_INTEGER_DIGITS,
        *(len(str(abs(bound))) + 1 for bound in bounds if bound is not None),
        0,
    )


def integer_pattern(low: int | None, high: int | None) -> str:
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts += [f"-(?:{part})" for part in natural_patterns(least, None if low is None else -low)]
    if high is None or high >= 0:
        parts += natural_patterns(max(low or 0, 0), high)
    return f"(?:{'|'.join(parts)})" if parts else NO_MATCH_PATTERN


def natural_patterns(low: int, high: int | None) -> list[str]:
    if high is None:
        digits = len(str(low))
        return [*natural_patterns(low, 10**digits - 1), f"[1-9][0-9]{{{digits},}}"]
    parts = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        least, most = max(low, 10 ** (digits - 1) if digits > 1 else 0), min(high, 10**digits - 1)
        if least <= most:
            parts.append(digit_range_pattern(str(least), str(most)))
    return parts


def digit_range_pattern(low: str, high: str) -> str:
    rest = len(low) - 1
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{len(low)}}}"
    if not rest or low[0] == high[0]:
        first = low[0] if low[0] == high[0] else f"[{low[0]}-{high[0]}]"
        return first + (digit_range_pattern(low[1:], high[1:]) if rest else "")
    parts = [
        low[0] + digit_range_pattern(low[1:], "9" * rest),
        high[0] + digit_range_pattern("0" * rest, high[1:]),
    ]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{rest}}}")
    return f"(?:{'|'.join(parts)})"


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


@keep_dfas
def integer_dfa(
    low: int | None, high: int | None, step: int, *, budget: StepBudget | None = None
) -> Dfa:
    if step > 1:  # remainders and digit counts together need too many states
        return minimize_dfa(
            intersect_dfas(
                pattern_dfa(integer_pattern(low, high), budget=budget), multiples_dfa(step)
            )
        )
    most = 10 ** max_integer_digits(low, high) - 1
    low, high = -most if low is None else low, most if high is None else high
    return minimize_dfa(pattern_dfa(integer_pattern(low, high), budget=budget))


@keep_dfas
def decimal_dfa(
    low: DecimalBound | None, high: DecimalBound | None, *, budget: StepBudget | None = None
) -> Dfa:
    bounds = [bound[0] for bound in (low, high) if bound is not None]
    pattern = number_pattern(bounds) + ("" if bounds else EXPONENT)
    dfa = minimize_dfa(pattern_dfa(pattern, budget=budget))
    if low is not None:
        dfa = intersect_dfas(dfa, pattern_dfa(at_least_pattern(*low), budget=budget))
    if high is not None:
        dfa = intersect_dfas(dfa, pattern_dfa(at_most_pattern(*high), budget=budget))
    return minimize_dfa(dfa)


@keep_dfas
def pattern_dfa(pattern: str, *, budget: StepBudget | None = None) -> Dfa:
    """Return the automaton of a regular expression; it may have no states."""
    return determinize_nfa(pattern_nfa(pattern), budget)


def number_pattern(bounds: list[Decimal]) -> str:
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
    front, rest = split_decimal(bound)
    equal = rf"\.{NONZERO}" if strict else FRACTION
    same = rf"\.{fraction_above(rest, strict)}" if rest else equal
    return f"(?:{'|'.join(natural_patterns(front + 1, None))}){FRACTION}|{front}{same}"


def unsigned_below(bound: Decimal, strict: bool) -> str:
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


def multiples_dfa(step: int) -> Dfa:
    table = np.full((2 + step, 256), -1, dtype=np.int32)
    digits = slice(ord("0"), ord("9") + 1)
    table[0, ord("-")] = 1
    table[:2, digits] = 2 + np.arange(10) % step
    table[2:, digits] = 2 + (10 * np.arange(step)[:, None] + np.arange(10)) % step
    return Dfa(table, np.arange(2 + step) == 2)


MAX_LEADING_ZEROS = 20
"""Maximum zeros between the point and the first digit of a bound."""

MAX_STEP = 5_000
"""Maximum step: the remainders are states of an automaton."""


def number_piece(
    case: SchemaCase, *, is_whole: bool, budget: StepBudget | None = None
) -> JsonPiece:
    """Return the piece of a number for which all keywords of a case hold; see `StepBudget`."""
    low, high, step = lower_bound(case), upper_bound(case), number_step(case)
    if is_whole or step is not None:
        least = None if low is None else floor(low[0]) + 1 if low[1] else ceil(low[0])
        most = None if high is None else ceil(high[0]) - 1 if high[1] else floor(high[0])
        return DfaPiece(integer_dfa(least, most, step or 1, budget=budget))
    return DfaPiece(decimal_dfa(low, high, budget=budget))


def number_fits(value: float, case: SchemaCase) -> bool:
    """Return whether a listed number satisfies the keywords of a case."""
    low, high, step = lower_bound(case), upper_bound(case), number_step(case)
    found = exact_decimal(value)
    return (
        (low is None or (found > low[0] if low[1] else found >= low[0]))
        and (high is None or (found < high[0] if high[1] else found <= high[0]))
        and (step is None or found % step == 0)
    )


def lower_bound(case: SchemaCase) -> DecimalBound | None:
    return max(bounds_of_side(case, "inimum"), default=None)


def upper_bound(case: SchemaCase) -> DecimalBound | None:
    return min(
        bounds_of_side(case, "aximum"), key=lambda bound: (bound[0], not bound[1]), default=None
    )


def bounds_of_side(case: SchemaCase, side: str) -> list[DecimalBound]:
    found = []
    for schema in case:
        for name, strict in ((f"m{side}", False), (f"exclusiveM{side}", True)):
            if name in schema.value:
                found.append((parse_bound(schema, name), strict))
    return found


def parse_bound(schema: SubSchema, name: str) -> Decimal:
    found = exact_decimal(require_type(schema.value[name], int | float, f"{name} at {schema.at}"))
    if found and found.adjusted() < -MAX_LEADING_ZEROS:
        refuse_keyword(
            f"{name} {schema.value[name]}",
            schema.at,
            "bounds with more than 20 zeros after the point",
        )
    return found


def exact_decimal(value: float) -> Decimal:
    """Return a JSON number as written, or an integer as a double stores it."""
    return Decimal(int(value)) if value == int(value) else Decimal(repr(value))


def number_step(case: SchemaCase) -> int | None:
    found = None
    for schema in case:
        if "multipleOf" not in schema.value:
            continue
        step = require_type(schema.value["multipleOf"], int | float, f"multipleOf at {schema.at}")
        if step <= 0:
            raise ValueError(f"multipleOf at {schema.at} must be above 0, got {step!r}")
        if step != int(step):
            # Validators that divide by it find that 0.07 is no multiple of 0.01.
            refuse_keyword(f"multipleOf {step}", schema.at, "multipleOf with a fraction")
        found = lcm(found or 1, int(step))
        if found > MAX_STEP:
            refuse_keyword(
                f"multipleOf {step}", schema.at, "multipleOf above 5000, or of several together"
            )
    return found
