"""Fields of published configurations: parsing, validation and rejection of unknown ones."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from outpace.errors import OptionError
from outpace.field_types import Bounds, describe_type, read_value

Fields = Mapping[str, Any]
"""A published configuration, or a part of one."""

ValueParser = Callable[[Any], Any]
"""Converts a published value; the message of its `ValueError` is what the value must be."""

MAX_PUBLISHED_SIZE, MAX_PUBLISHED_COUNT = 2**24, 2**12
"""Limits on sizes, and on numbers of layers or heads, above those of any published model."""

REQUIRED_FIELD = object()


@dataclass(frozen=True, slots=True)
class Field:
    """A value read from published fields.

    Attributes:
        names: The published fields.
        read: Function of all published fields and of the values read before, by our names.
    """

    names: tuple[str, ...]
    read: Callable[[Fields, Fields], Any]


def field(names: str, check: ValueParser, default: Any = REQUIRED_FIELD) -> Field:
    """Return a field with the value of the first of some published fields that is present.

    Args:
        names: Published names, separated by spaces.
        check: Parser of the value.
        default: Value if none is present, or a function of the values read before.
    """
    spellings = tuple(names.split())

    def read_value(published: Fields, ours: Fields) -> Any:
        for name in spellings:
            if (found := published.get(name)) is not None:
                return parse_value(name, found, check)
        if default is REQUIRED_FIELD:
            name = spellings[-1]
            raise OptionError(name, None, "is missing")
        return default(ours) if callable(default) else default

    return Field(spellings, read_value)


def group(make: Callable[..., Any], fields: Fields) -> Field:
    """Return a field whose value is an object made from a table of fields."""
    return Field(
        tuple(published_names(fields)),
        lambda published, ours: make(**read_fields(fields, published)),
    )


def read_fields(fields: Fields, published: Fields) -> dict[str, Any]:
    """Read a table of fields; entries may also be functions of earlier values, or constants."""
    ours: dict[str, Any] = {}
    for name, entry in fields.items():
        if isinstance(entry, Field):
            ours[name] = entry.read(published, ours)
        else:
            ours[name] = entry(ours) if callable(entry) else entry
    return ours


def published_names(fields: Fields) -> set[str]:
    """Return the published names that a table of fields reads."""
    return {name for entry in fields.values() if isinstance(entry, Field) for name in entry.names}


def parse_value(name: str, value: Any, check: ValueParser) -> Any:
    """Parse a published value; raise `OptionError` with its name if it is invalid."""
    try:
        return check(value)
    except ValueError as error:
        raise OptionError(name, value, f"must be {error}") from None


def refuse_unknown_fields(published: Fields, known: Collection[str], remedy: str) -> None:
    """Raise `ValueError` for an unknown field that may change the computation."""
    for name, value in published.items():
        neutral = value is None or value is False or value in ([], {}, "")
        if name not in known and not neutral:
            raise ValueError(f"{name} is {shorten(value)}, which is not supported; {remedy}")


def refuse_others(published: Fields, fixed: Fields, ours: Fields, remedy: str) -> None:
    """Raise `ValueError` for a field with a value other than the only supported one."""
    for name, entry in fixed.items():
        expected = entry(ours) if callable(entry) else entry
        if published.get(name) not in (None, expected):
            value = shorten(published[name])
            raise ValueError(f"{name} must be {expected!r}, got {value}; {remedy}")


def read_known_fields(
    fields: Fields, published: Fields, *, fixed: Fields, ignored: Collection[str], remedy: str
) -> dict[str, Any]:
    """Read a table of fields of an object with no others than `fixed` and `ignored` ones.

    Raises:
        ValueError: For an invalid or unknown field, or another value than in `fixed`.
    """
    refuse_unknown_fields(published, {*published_names(fields), *fixed, *ignored}, remedy)
    ours = read_fields(fields, published)
    refuse_others(published, fixed, ours, remedy)
    return ours


def words(text: str) -> frozenset[str]:
    """Return the names in a string, separated by whitespace."""
    return frozenset(text.split())


def error_line(error: BaseException) -> str:
    return " ".join(str(error).split())


@contextmanager
def convert_panics(what: str) -> Iterator[None]:
    """Convert a panic of the tokenizers library, not an `Exception`, into a `ValueError`."""
    try:
        yield
    except BaseException as error:
        # The class cannot be imported: each Rust library defines its own.
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"{what}: the tokenizers library failed: {error_line(error)[:200]}"
        ) from error


def shorten(value: Any) -> str:
    return reprlib.repr(value)


def parser_of(hint: Any) -> ValueParser:
    """Return a parser of the values that an option of a type may have."""

    def parse_option(value: Any) -> Any:
        try:
            return read_value(value, hint)
        except TypeError:
            raise ValueError(describe_type(hint)) from None

    return parse_option


count = parser_of(Annotated[int, Bounds(1, MAX_PUBLISHED_SIZE)])
few = parser_of(Annotated[int, Bounds(1, MAX_PUBLISHED_COUNT)])
index = parser_of(Annotated[int, Bounds(0, MAX_PUBLISHED_SIZE - 1)])
number = parser_of(Annotated[float, Bounds(0, 1e18, above=True, below=True)])
flag = parser_of(bool)
text = parser_of(str)
mapping = parser_of(dict[str, Any])


def choice(values: Iterable[str | bool]) -> ValueParser:
    """Return a parser of some values, which a mapping translates."""
    known = values if isinstance(values, Mapping) else {value: value for value in values}

    def parse_choice(value: Any) -> Any:
        if isinstance(value, str | bool) and value in known:
            return known[value]
        raise ValueError(" or ".join(map(repr, known)))

    return parse_choice


def indices(value: Any) -> tuple[int, ...]:
    """Parse indices of tokens or layers, given as one or a list."""
    values = value if isinstance(value, list) else [value]
    if len(values) > MAX_PUBLISHED_COUNT:
        raise ValueError(f"at most {MAX_PUBLISHED_COUNT} numbers")
    return tuple(index(entry) for entry in values)


def some_indices(value: Any) -> tuple[int, ...]:
    """Parse at least one index of a layer."""
    if values := indices(value):
        return values
    raise ValueError("at least one number")


def inner(published: Fields, name: str) -> dict[str, Any]:
    """Return the object under a name; an empty one if it is missing."""
    found: dict[str, Any] = parse_value(name, published.get(name) or {}, mapping)
    return found


def merge_fields(outer: Fields, nested: Fields) -> Fields:
    """Merge the fields of two objects; null counts as missing.

    Raises:
        ValueError: For a field with different values in the two.
    """
    inside = {name: value for name, value in nested.items() if value is not None}
    for name, value in inside.items():
        if outer.get(name) is not None and not are_equal(outer[name], value):
            raise ValueError(
                f"{name} is {shorten(outer[name])} in one place and {shorten(value)} in another"
            )
    return {**outer, **inside}


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal, also if both are NaN, which their parser refuses."""
    return bool(one == other or repr(one) == repr(other))


def either(one: tuple[int, ...], other: tuple[int, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the list that is not empty; raise `ValueError` if both are and differ."""
    if one and other and one != other:
        raise ValueError(f"{' and '.join(names)} have different values; keep one")
    return one or other


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raise `ValueError` naming the file if it has none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, got {shorten(content)}")
    return content
