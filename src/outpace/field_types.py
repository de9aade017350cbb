"""Field types of training options, and checks of values against them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from outpace.decoding.sampling_params import is_finite_real, is_whole_number
from outpace.errors import OptionError

TYPE_NAMES: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    NoneType: "nothing",
}
"""Names of types in error messages."""

MAX_FLOAT = 1e30
"""Exclusive bound on every float of a recipe; also excludes infinities and NaN."""


MAX_COUNT, MAX_SEED = 2**31 - 1, 2**63 - 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a number in an `Annotated` type.

    `above` excludes the lower bound, `below` the upper one.
    """

    low: float
    high: float
    above: bool = False
    below: bool = False

    def contains(self, value: Any) -> bool:
        """Return whether a number is within the bounds."""
        low = self.low < value if self.above else self.low <= value
        return bool(low and (value < self.high if self.below else value <= self.high))

    def __str__(self) -> str:
        if not (self.above or self.below):
            return f"from {self.low} to {self.high}"
        low = f"{'above' if self.above else 'at least'} {self.low}"
        return f"{low} and {'below' if self.below else 'at most'} {self.high}"


Count = Annotated[int, Bounds(1, MAX_COUNT)]
NonNegativeInt = Annotated[int, Bounds(0, MAX_COUNT)]
RandomSeed = Annotated[int, Bounds(0, MAX_SEED)]
TokenId = Annotated[int, Bounds(0, 2**24 - 1)]
Fraction = Annotated[float, Bounds(0, 1)]
OpenFraction = Annotated[float, Bounds(0, 1, above=True, below=True)]
Weight = Annotated[float, Bounds(0, 10**6)]
PositiveFloat = Annotated[float, Bounds(0, 10**6, above=True)]


def field_hints(kind: type[Any]) -> dict[str, Any]:
    """Return the annotations of a dataclass, including `Bounds`."""
    return get_type_hints(kind, include_extras=True)


def check_bounds(settings: Any) -> None:
    """Raise `ValueError` for a field of a dataclass outside its annotated bounds or choices."""
    for name, hint in field_hints(type(settings)).items():
        if has_bounds(hint) and not matches_type(value := getattr(settings, name), hint):
            raise OptionError(name, value, f"must be {describe_type(hint)}")


def has_bounds(hint: Any) -> bool:
    """Return whether an annotation, or a part of it, has bounds or choices."""
    return get_origin(hint) in (Annotated, Literal) or any(map(has_bounds, get_args(hint)))


def check_values(where: str, kind: type[Any], values: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a value that does not match its field's annotation.

    Lists are accepted for tuples and integers for floats; floats must be finite.
    """
    hints = field_hints(kind)
    for name, value in values.items():
        if not matches_type(value, hints[name]):
            raise ValueError(
                f"{where}: {name} must be {describe_type(hints[name])}, got {reprlib.repr(value)}"
            )


def check_names(where: str, table: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raise `ValueError` for keys of a table that are not among those allowed."""
    if unknown := sorted(set(table) - set(allowed)):
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; allowed are {', '.join(allowed)}")


def matches_type(value: Any, hint: Any) -> bool:
    """Return whether a value matches an annotation."""
    parts, of = get_args(hint), get_origin(hint)
    if of is Annotated:
        return matches_type(value, parts[0]) and all(bounds.contains(value) for bounds in parts[1:])
    if of in (Union, UnionType):
        return any(matches_type(value, part) for part in parts)
    if of is Literal:
        return isinstance(value, str) and value in parts
    if of is tuple:
        if not isinstance(value, list | tuple):
            return False
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(value) == len(kinds) and all(map(matches_type, value, kinds))
    if hint is float:
        return is_finite_real(value) and -MAX_FLOAT < value < MAX_FLOAT
    if hint is int:
        return is_whole_number(value)
    if hint in TYPE_NAMES:
        return type(value) is hint
    return isinstance(value, of or hint)


def describe_type(hint: Any) -> str:
    """Describe an annotation in words."""
    parts, of = get_args(hint), get_origin(hint)
    if of is Annotated:
        return f"{describe_type(parts[0])} {parts[1]}"
    if of in (Union, UnionType):
        return " or ".join(describe_type(part) for part in parts if part is not NoneType)
    if of is Literal:
        return " or ".join(parts)
    if of is tuple:
        if parts[-1] is Ellipsis:
            return f"a list, each entry {describe_type(parts[0])}"
        return f"a list of {len(parts)}, each entry {describe_type(parts[0])}"
    return TYPE_NAMES.get(hint, "a table")
