"""Numbers of JSON schemas, as pieces of a string."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from math import ceil, floor

from outpace.constraint.algebra import subtract_dfa
from outpace.constraint.decimals import (
    DecimalBound,
    common_multiple,
    decimal_dfa,
    equal_number_dfa,
    integer_dfa,
)
from outpace.constraint.keywords import refuse_keyword, require_type
from outpace.constraint.pieces import DfaPiece, JsonPiece
from outpace.constraint.rules import SchemaCase, SubSchema, exclusions

MAX_LEADING_ZEROS = 20
"""Maximum zeros between the point and the first digit of a bound."""

MAX_REMAINDERS = 5_000
"""Maximum remainders of a step times its fraction digits: states of an automaton."""

MAX_STEP_DENOMINATOR = 1024
"""Maximum denominator of a step, a power of two: division by such a step is exact."""


def number_piece(case: SchemaCase, *, is_whole: bool) -> JsonPiece:
    """Return the piece of a number for which all keywords of a case hold."""
    low, high, steps = lower_bound(case), upper_bound(case), number_steps(case)
    if is_whole:
        least = None if low is None else floor(low[0]) + 1 if low[1] else ceil(low[0])
        most = None if high is None else ceil(high[0]) - 1 if high[1] else floor(high[0])
        dfa = integer_dfa(least, most, steps)
    else:
        dfa = decimal_dfa(low, high, steps)
    for schema in case:
        for value in exclusions(schema)[1]:
            if isinstance(value, int | float) and not isinstance(value, bool):
                dfa = subtract_dfa(dfa, equal_number_dfa(exact_decimal(value)))
    return DfaPiece(dfa)


def number_fits(value: float, case: SchemaCase) -> bool:
    """Return whether a listed number satisfies the keywords of a case."""
    low, high, found = lower_bound(case), upper_bound(case), exact_decimal(value)
    return (
        (low is None or (found > low[0] if low[1] else found >= low[0]))
        and (high is None or (found < high[0] if high[1] else found <= high[0]))
        and all(Fraction(found) % Fraction(step) == 0 for step in number_steps(case))
    )


def lower_bound(case: SchemaCase) -> DecimalBound | None:
    """Return the largest of the lower bounds."""
    return max(bounds_of_side(case, "inimum"), default=None)


def upper_bound(case: SchemaCase) -> DecimalBound | None:
    """Return the smallest of the upper bounds."""
    return min(
        bounds_of_side(case, "aximum"), key=lambda bound: (bound[0], not bound[1]), default=None
    )


def bounds_of_side(case: SchemaCase, side: str) -> list[DecimalBound]:
    """Return all bounds of one side."""
    found = []
    for schema in case:
        for name, strict in ((f"m{side}", False), (f"exclusiveM{side}", True)):
            if name in schema.value:
                found.append((parse_bound(schema, name), strict))
    return found


def parse_bound(schema: SubSchema, name: str) -> Decimal:
    """Return a bound.

    Raises:
        UnsupportedError: if it is too close to zero.
    """
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


def number_steps(case: SchemaCase) -> tuple[Decimal, ...]:
    """Return the steps of which a number must be a multiple.

    Raises:
        UnsupportedError: for a fraction that a double cannot store, because validators that
            divide by it find that 0.07 is no multiple of 0.01.
    """
    found = set[Decimal]()
    for schema in case:
        if "multipleOf" not in schema.value:
            continue
        step = require_type(schema.value["multipleOf"], int | float, f"multipleOf at {schema.at}")
        if step <= 0:
            raise ValueError(f"multipleOf at {schema.at} must be above 0, got {step!r}")
        if Fraction(step).denominator > MAX_STEP_DENOMINATOR:
            refuse_keyword(
                f"multipleOf {step}",
                schema.at,
                "multipleOf with a fraction other than halves, quarters …",
            )
        found.add(exact_decimal(step))
        places, size = common_multiple(tuple(found))
        if size * (places + 1) > MAX_REMAINDERS:
            refuse_keyword(
                f"multipleOf {step}", schema.at, "multipleOf above 5000, or of several together"
            )
    return tuple(sorted(found))
