"""Schema of stored results, checked before they are shown or compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outpace.checkpoints.fields import shorten

MAX_FIGURE = 1e30
"""Upper bound of all numbers; neither infinity nor NaN is below it."""

Predicate = Callable[[Any], bool]


def is_text(value: Any) -> bool:
    """Return whether a value is a string."""
    return isinstance(value, str)


def is_finite_number(value: Any) -> bool:
    """Return whether a value is a finite, non-negative number."""
    return type(value) in (int, float) and 0 <= value < MAX_FIGURE


def is_share(value: Any) -> bool:
    """Return whether a value is between 0 and 1."""
    return is_finite_number(value) and value <= 1


def is_verdict(value: Any) -> bool:
    """Return whether a value is true, false or null (not judged)."""
    return value is None or isinstance(value, bool)


def is_null_or(fits: Predicate) -> Predicate:
    """Return a predicate that also accepts null."""
    return lambda value: value is None or fits(value)


def is_list_of(fits: Predicate, count: int) -> Predicate:
    """Return a predicate for lists of `count` values."""
    return lambda value: isinstance(value, list) and len(value) == count and all(map(fits, value))


def is_object_with(keys: Mapping[str, Predicate]) -> Predicate:
    """Return a predicate for objects whose values at some keys are valid."""
    return lambda value: (
        isinstance(value, dict) and all(k in value and fits(value[k]) for k, fits in keys.items())
    )


is_percentiles = is_object_with({"p50": is_finite_number, "p95": is_finite_number})

REQUIRED_FIELDS: dict[str, tuple[Predicate, str]] = {
    **dict.fromkeys(("task", "questions", "model", "method"), (is_text, "a text")),
    "problems": (
        lambda value: type(value) is int and 0 < value < MAX_FIGURE,
        "a whole number above 0",
    ),
    "batch": (is_finite_number, "a number"),
    "accuracy": (is_null_or(is_share), "a number from 0 to 1, or null"),
    "interval": (is_null_or(is_list_of(is_share, 2)), "two numbers from 0 to 1, or null"),
    **dict.fromkeys(("tokens_per_forward", "tokens_per_second"), (is_finite_number, "a number")),
    **dict.fromkeys(
        ("tokens_per_forward_error", "p_cache"), (is_null_or(is_finite_number), "a number or null")
    ),
    **dict.fromkeys(("latency", "first_text"), (is_percentiles, "seconds as p50 and p95")),
    "acceptance_length": (is_finite_number, "a number"),
}
"""Fields required to show or compare a result, with their predicates."""

OPTIONAL_FIELDS: dict[str, tuple[Predicate, str]] = {
    "tokens_per_cpu_second": (is_finite_number, "a number"),
    "tokens_per_cpu_second_error": (is_null_or(is_finite_number), "a number or null"),
    **dict.fromkeys(("line", "setting"), (is_text, "a text")),
    "unfinished": (is_finite_number, "a number"),
    "cut_at": (is_null_or(is_finite_number), "a number or null"),
}
"""Fields that are shown if present."""


def check_result(result: Any) -> None:
    """Raise `ValueError` for a missing or invalid field, with its name and value."""
    columns = {"right": is_verdict, "tokens": is_finite_number, "forwards": is_finite_number}
    if missing := [name for name in (*REQUIRED_FIELDS, "samples") if name not in result]:
        raise ValueError(f"has a result without {missing[0]}")
    for name, (fits, what) in {**REQUIRED_FIELDS, **OPTIONAL_FIELDS}.items():
        if name in result and not fits(result[name]):
            raise ValueError(f"has {name} {shorten(result[name])}, which must be {what}")
    count = result["problems"]
    if not is_object_with({key: is_list_of(fits, count) for key, fits in columns.items()})(
        result["samples"]
    ):
        raise ValueError(f"has samples that are not {', '.join(columns)} of {count} answers each")
