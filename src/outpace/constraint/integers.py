"""Integers between two bounds, as regular expressions."""

from __future__ import annotations

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
    """Return the pattern of integers from `low` to `high`, inclusive; None is unbounded."""
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts += [f"-(?:{part})" for part in natural_patterns(least, None if low is None else -low)]
    if high is None or high >= 0:
        parts += natural_patterns(max(low or 0, 0), high)
    return f"(?:{'|'.join(parts)})" if parts else NO_MATCH_PATTERN


def natural_patterns(low: int, high: int | None) -> list[str]:
    """Return patterns of unsigned integers by length; none if `high` is less than `low`."""
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
    """Return the pattern of digits from `low` to `high`, which have equal length."""
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
