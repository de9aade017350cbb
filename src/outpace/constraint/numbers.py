"""Numbers of JSON schemas, as pieces of a text."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from math import ceil, floor

from outpace.constraint.algebra import difference
from outpace.constraint.decimals import Bound, decimals, equal_to, remainders_of, whole
from outpace.constraint.keywords import need, refuse
from outpace.constraint.pieces import Leaf, Piece
from outpace.constraint.rules import Case, Schema, excluded

DECIMALS = 20
"""Maximum zeros between the point and the first digit of a bound."""

MOST_REMAINDERS = 5_000
"""Maximum remainders of a step times its fraction digits: states of an automaton."""

FINEST = 1024
"""Maximum denominator of a step, a power of two: division by such a step is exact."""


def number(case: Case, *, is_whole: bool) -> Piece:
    """Return the piece of a number for which all keywords of a case hold."""
    low, high, steps = lowest(case), highest(case), multiples_of(case)
    if is_whole:
        least = None if low is None else floor(low[0]) + 1 if low[1] else ceil(low[0])
        most = None if high is None else ceil(high[0]) - 1 if high[1] else floor(high[0])
        dfa = whole(least, most, steps)
    else:
        dfa = decimals(low, high, steps)
    for schema in case:
        for value in excluded(schema)[1]:
            if isinstance(value, int | float) and not isinstance(value, bool):
                dfa = difference(dfa, equal_to(exact(value)))
    return Leaf(dfa)


def number_fits(value: float, case: Case) -> bool:
    """Return whether a listed number satisfies the keywords of a case."""
    low, high, found = lowest(case), highest(case), exact(value)
    return (
        (low is None or (found > low[0] if low[1] else found >= low[0]))
        and (high is None or (found < high[0] if high[1] else found <= high[0]))
        and all(Fraction(found) % Fraction(step) == 0 for step in multiples_of(case))
    )


def lowest(case: Case) -> Bound | None:
    """Return the largest of the lower bounds."""
    return max(bounds(case, "inimum"), default=None)


def highest(case: Case) -> Bound | None:
    """Return the smallest of the upper bounds."""
    return min(bounds(case, "aximum"), key=lambda bound: (bound[0], not bound[1]), default=None)


def bounds(case: Case, side: str) -> list[Bound]:
    """Return all bounds of one side."""
    found = []
    for schema in case:
        for name, strict in ((f"m{side}", False), (f"exclusiveM{side}", True)):
            if name in schema.value:
                found.append((bound(schema, name), strict))
    return found


def bound(schema: Schema, name: str) -> Decimal:
    """Return a bound.

    Raises:
        UnsupportedError: if it is too close to zero.
    """
    found = exact(need(schema.value[name], int | float, f"{name} at {schema.at}"))
    if found and found.adjusted() < -DECIMALS:
        refuse(
            f"{name} {schema.value[name]}",
            schema.at,
            "bounds with more than 20 zeros after the point",
        )
    return found


def exact(value: float) -> Decimal:
    """Return a JSON number as written, or an integer as a double stores it."""
    return Decimal(int(value)) if value == int(value) else Decimal(repr(value))


def multiples_of(case: Case) -> tuple[Decimal, ...]:
    """Return the steps of which a number must be a multiple.

    Raises:
        UnsupportedError: for a fraction that a double cannot store, because validators that
            divide by it find that 0.07 is no multiple of 0.01.
    """
    found = set[Decimal]()
    for schema in case:
        if "multipleOf" not in schema.value:
            continue
        step = need(schema.value["multipleOf"], int | float, f"multipleOf at {schema.at}")
        if step <= 0:
            raise ValueError(f"multipleOf at {schema.at} must be above 0, got {step!r}")
        if Fraction(step).denominator > FINEST:
            refuse(
                f"multipleOf {step}",
                schema.at,
                "multipleOf with a fraction other than halves, quarters …",
            )
        found.add(exact(step))
        places, size = remainders_of(tuple(found))
        if size * (places + 1) > MOST_REMAINDERS:
            refuse(f"multipleOf {step}", schema.at, "multipleOf above 5000, or of several together")
    return tuple(sorted(found))
