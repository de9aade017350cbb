"""Schema of stored results, checked before they are shown or compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outpace.checkpoints.fields import brief

LARGE = 1e30
"""Upper bound of all numbers; neither infinity nor NaN is below it."""

Fits = Callable[[Any], bool]


def is_text(value: Any) -> bool:
    """Return whether a value is a string."""
    return isinstance(value, str)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite, non-negative number."""
    return type(value) in (int, float) and 0 <= value < LARGE


def is_share(value: Any) -> bool:
    """Return whether a value is between 0 and 1."""
    return is_number(value) and value <= 1


def is_verdict(value: Any) -> bool:
    """Return whether a value is true, false or null (not judged)."""
    return value is None or isinstance(value, bool)


def maybe(fits: Fits) -> Fits:
    """Return a predicate that also accepts null."""
    return lambda value: value is None or fits(value)


def listed(fits: Fits, count: int) -> Fits:
    """Return a predicate for lists of `count` values."""
    return lambda value: isinstance(value, list) and len(value) == count and all(map(fits, value))


def under(keys: Mapping[str, Fits]) -> Fits:
    """Return a predicate for objects whose values at some keys are valid."""
    return lambda value: (
        isinstance(value, dict) and all(k in value and fits(value[k]) for k, fits in keys.items())
    )


SECONDS = under({"p50": is_number, "p95": is_number})

READ: dict[str, tuple[Fits, str]] = {
    **dict.fromkeys(("task", "questions", "model", "method"), (is_text, "a text")),
    "problems": (lambda value: type(value) is int and 0 < value < LARGE, "a whole number above 0"),
    "batch": (is_number, "a number"),
    "accuracy": (maybe(is_share), "a number from 0 to 1, or null"),
    "interval": (maybe(listed(is_share, 2)), "two numbers from 0 to 1, or null"),
    **dict.fromkeys(("tokens_per_forward", "tokens_per_second"), (is_number, "a number")),
    **dict.fromkeys(
        ("tokens_per_forward_error", "p_cache"), (maybe(is_number), "a number or null")
    ),
    **dict.fromkeys(("latency", "first_text"), (SECONDS, "seconds as p50 and p95")),
    "acceptance_length": (is_number, "a number"),
}
"""Fields required to show or compare a result, with their predicates."""

DRAWN: dict[str, tuple[Fits, str]] = {
    "tokens_per_cpu_second": (is_number, "a number"),
    "tokens_per_cpu_second_error": (maybe(is_number), "a number or null"),
    **dict.fromkeys(("line", "setting"), (is_text, "a text")),
    "unfinished": (is_number, "a number"),
    "cut_at": (maybe(is_number), "a number or null"),
}
"""Fields that are shown if present."""


def check(result: Any) -> None:
    """Raise `ValueError` for a missing or invalid field, with its name and value."""
    columns = {"right": is_verdict, "tokens": is_number, "forwards": is_number}
    if missing := [name for name in (*READ, "samples") if name not in result]:
        raise ValueError(f"has a result without {missing[0]}")
    for name, (fits, what) in {**READ, **DRAWN}.items():
        if name in result and not fits(result[name]):
            raise ValueError(f"has {name} {brief(result[name])}, which must be {what}")
    count = result["problems"]
    if not under({key: listed(fits, count) for key, fits in columns.items()})(result["samples"]):
        raise ValueError(f"has samples that are not {', '.join(columns)} of {count} answers each")
