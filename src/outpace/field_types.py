"""Options declared as fields of dataclasses, and checks of values against the declarations.

`depth: Annotated[PositiveInt | None, "levels of tree"] = None` declares type, range and text.
Methods, requests, loading, the server, recipes and figures of papers declare their options so, and
flags, help texts and the schema of HTTP requests are made from these declarations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from outpace.errors import OptionError

MAX_FLOAT = 1e4
"""Largest float without bounds: more changes nothing, and logits times 1e30 would overflow."""

MAX_COUNT, MAX_SEED = 2**31 - 1, 2**63 - 1


def is_finite_real(value: object) -> bool:
    """Return whether a value is a finite number, and not a bool."""
    try:
        return (
            isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))
        )
    except OverflowError:
        return False


def is_whole_number(value: object) -> bool:
    """Return whether a value is a whole number, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a number in an `Annotated` type.

    `above` excludes the lower bound, `below` the upper one.
    """

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def contains(self, value: Any) -> bool:
        """Return whether a number is within the bounds."""
        low = self.low < value if self.above else self.low <= value
        return bool(low and (value < self.high if self.below else value <= self.high))

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'above' if self.above else 'of at least'} {self.low}"
        if not (self.above or self.below):
            return f"from {self.low} to {self.high}"
        low = f"{'above' if self.above else 'at least'} {self.low}"
        return f"{low} and {'below' if self.below else 'at most'} {self.high}"


FLOAT_BOUNDS = Bounds(-MAX_FLOAT, MAX_FLOAT)

Count = Annotated[int, Bounds(1, MAX_COUNT)]
PositiveInt = Annotated[int, Bounds(1)]
NonNegativeInt = Annotated[int, Bounds(0, MAX_COUNT)]
RandomSeed = Annotated[int, Bounds(0, MAX_SEED)]
TokenId = Annotated[int, Bounds(0, 2**24 - 1)]
Fraction = Annotated[float, Bounds(0, 1)]
PositiveFraction = Annotated[float, Bounds(0, 1, above=True)]
OpenFraction = Annotated[float, Bounds(0, 1, above=True, below=True)]
Temperature = Annotated[float, Bounds(0, 1e30, below=True)]
CacheSize = Annotated[float, Bounds(0, MAX_FLOAT, above=True)]
Weight = Annotated[float, Bounds(0, 10**6)]
NonNegativeFloat = Annotated[float, Bounds(0, MAX_FLOAT)]
PositiveFloat = Annotated[float, Bounds(0, 10**6, above=True)]

TYPE_NAMES: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
}
"""Names of types in error messages."""

Mark = TypeVar("Mark")
Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option, as the field of a dataclass declares it.

    Attributes:
        name: Name of the field.
        hint: Type of the field, with its bounds.
        default: Default value; MISSING for a required option.
        marks: What its annotation has besides bounds, such as its text.
    """

    name: str
    hint: Any
    default: Any
    marks: tuple[Any, ...]

    @property
    def text(self) -> str:
        """What the option means, for help and documentation; empty without a text."""
        return self.mark(str) or ""

    @property
    def summary(self) -> str:
        """The first sentence of the text."""
        return re.split(r"(?<=\.) (?=[A-Z])", self.text, maxsplit=1)[0]

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def types(self) -> dict[Any, Bounds | None]:
        """The types of its values, without None and words, and their bounds."""
        return {
            part: bounds
            for part, bounds in flat_types(self.hint)
            if part is not NoneType and get_origin(part) is not Literal
        }

    @property
    def kind(self) -> Any:
        """The first of its types; str for words alone."""
        return next(iter(self.types), str)

    @property
    def words(self) -> tuple[str, ...]:
        """Allowed words, next to numbers; all allowed values of words alone."""
        parts = (part for part, _ in flat_types(self.hint) if get_origin(part) is Literal)
        return tuple(word for part in parts for word in get_args(part))

    @property
    def is_nullable(self) -> bool:
        return any(part is NoneType for part, _ in flat_types(self.hint))

    def mark(self, kind: type[Mark]) -> Mark | None:
        """Return the mark of a type; None without one."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)


@cache
def list_options(kind: type) -> Mapping[str, Option]:
    """Return the options of a dataclass by name, those of its base classes last."""
    hints = get_type_hints(kind, include_extras=True)
    defaults = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(kind)
    }
    names = [name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())]
    found = {}
    for name in dict.fromkeys(name for name in names if name in defaults):
        marks = hints[name].__metadata__ if get_origin(hints[name]) is Annotated else ()
        others = tuple(mark for mark in marks if not isinstance(mark, Bounds))
        found[name] = Option(name=name, hint=hints[name], default=defaults[name], marks=others)
    return MappingProxyType(found)


def check_fields(options: Any) -> None:
    """Convert the fields of a dataclass to plain Python types; raise `OptionError` for others."""
    for name, option in list_options(options.__class__).items():
        object.__setattr__(options, name, check_value(name, getattr(options, name), option.hint))


def read_section(where: str, kind: type[Section], table: Mapping[str, Any]) -> Section:
    """Return a dataclass with the values of a TOML table.

    Raises:
        ValueError: A key is unknown or missing, or a value does not match its field's annotation.
    """
    options = list_options(cast(Any, kind))
    check_names(where, table, [*options])
    required = [name for name, option in options.items() if option.is_required]
    if missing := [name for name in required if name not in table]:
        raise ValueError(f"{where} needs {' and '.join(missing)}")
    return kind(**check_values(where, kind, table))


def check_values(where: str, kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of a dataclass as plain types; raise `ValueError` for other types."""
    options = list_options(kind)
    try:
        return {name: check_value(name, each, options[name].hint) for name, each in values.items()}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def check_at_least_one(**options: Any) -> None:
    for name, value in options.items():
        check_value(name, value, PositiveInt | None)


def check_names(where: str, table: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raise `ValueError` for keys of a table that are not among those allowed."""
    if unknown := sorted(set(table) - set(allowed)):
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; allowed are {', '.join(allowed)}")


def check_value(name: str, value: Any, hint: Any) -> Any:
    """Return the value of an option as the plain type of its annotation.

    Lists are accepted for tuples, and integers for floats.

    Raises:
        OptionError: The value has another type, or is outside the bounds.
    """
    try:
        return read_value(value, hint)
    except TypeError:
        raise OptionError(name, value, f"must be {describe_type(hint)}") from None


def read_value(value: Any, hint: Any, bounds: Bounds | None = None) -> Any:
    """Return a value as the plain type of an annotation; raise `TypeError` if it does not match."""
    parts, of = get_args(hint), get_origin(hint)
    if of is Annotated:
        return read_value(value, parts[0], find_bounds(parts[1:]) or bounds)
    if of in (Union, UnionType):
        # The first type that fits: an integer stays one for `int | float`.
        for part in parts:
            with suppress(TypeError):
                return read_value(value, part, bounds)
    elif of is tuple and isinstance(value, list | tuple):
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        if len(value) == len(kinds):
            return tuple(map(read_value, value, kinds))
    elif of is Literal:
        if isinstance(value, str) and value in parts:
            return str(value)
    elif hint is str:
        if isinstance(value, str | Path):
            return str(value)
    elif hint is float:
        if is_finite_real(value) and (bounds or FLOAT_BOUNDS).contains(value):
            return float(value)
    elif hint is int:
        if is_whole_number(value) and (bounds is None or bounds.contains(value)):
            return int(value)
    elif hint is Any or isinstance(value, of or hint):
        return value
    raise TypeError


def describe_type(hint: Any) -> str:
    """Describe an annotation in words."""
    parts, of = get_args(hint), get_origin(hint)
    if of is Annotated:
        bounds = find_bounds(parts[1:])
        return f"{describe_type(parts[0])}{'' if bounds is None else f' {bounds}'}"
    if of in (Union, UnionType):
        return " or ".join(describe_type(part) for part in parts if part is not NoneType)
    if of is Literal:
        return " or ".join(parts)
    if of is tuple:
        size = "" if parts[-1] is Ellipsis else f" of {len(parts)}"
        return f"a list{size}, each entry {describe_type(parts[0])}"
    return TYPE_NAMES.get(hint, "a table")


def find_bounds(marks: Iterable[Any]) -> Bounds | None:
    return next((mark for mark in marks if isinstance(mark, Bounds)), None)


def flat_types(hint: Any, bounds: Bounds | None = None) -> Iterator[tuple[Any, Bounds | None]]:
    """Yield the parts of a union, without annotations, each with its bounds."""
    parts, of = get_args(hint), get_origin(hint)
    if of is Annotated:
        yield from flat_types(parts[0], find_bounds(parts[1:]) or bounds)
    elif of in (Union, UnionType):
        for part in parts:
            yield from flat_types(part, bounds)
    else:
        yield hint, bounds
