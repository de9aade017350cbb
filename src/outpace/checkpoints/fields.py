"""Fields of a published configuration: what each may say, and those that nothing here knows."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.decoding.sampling_params import is_whole
from outpace.errors import OptionError

Given = Mapping[str, Any]
"""A published configuration, or a part of one."""

Check = Callable[[Any], Any]
"""From a published value to ours; `ValueError` saying what it must be."""

LARGE, MANY = 2**24, 2**12
"""More than any size of a published model, and more layers or heads than any has."""

REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Field:
    """What some published fields say together, given what has been read before, by our names."""

    names: tuple[str, ...]
    value: Callable[[Given, Given], Any]


def field(names: str, check: Check, default: Any = REQUIRED) -> Field:
    """The first given of some published fields.

    A default, or what a function makes of what was read before, stands for none of them.
    """
    spellings = tuple(names.split())

    def value(given: Given, ours: Given) -> Any:
        for name in spellings:
            if (found := given.get(name)) is not None:
                return checked(name, found, check)
        if default is REQUIRED:
            raise ValueError(f"the field {spellings[-1]!r} is missing")
        return default(ours) if callable(default) else default

    return Field(spellings, value)


def group(make: Callable[..., Any], fields: Given) -> Field:
    """Something made of a table of fields."""
    return Field(tuple(names_of(fields)), lambda given, ours: make(**taken(fields, given)))


def taken(fields: Given, given: Given) -> dict[str, Any]:
    """Values of a table of fields, of functions of those before them, and of plain values."""
    ours: dict[str, Any] = {}
    for name, entry in fields.items():
        if isinstance(entry, Field):
            ours[name] = entry.value(given, ours)
        else:
            ours[name] = entry(ours) if callable(entry) else entry
    return ours


def names_of(fields: Given) -> set[str]:
    """Published names that a table of fields reads."""
    return {name for entry in fields.values() if isinstance(entry, Field) for name in entry.names}


def checked(name: str, value: Any, check: Check) -> Any:
    """A published value as ours; `OptionError` with its name where it is of another kind."""
    try:
        return check(value)
    except ValueError as error:
        raise OptionError(name, value, f"{name} is {brief(value)}, but must be {error}") from None


def refuse_unknown(given: Given, known: Collection[str], remedy: str) -> None:
    """Raise `ValueError` for a field that may change what is computed, and is not known."""
    for name, value in given.items():
        neutral = value is None or value is False or value in ([], {}, "")
        if name not in known and not neutral:
            raise ValueError(f"{name} is {brief(value)}, which is not supported; {remedy}")


def refuse_other(given: Given, fixed: Given, ours: Given, remedy: str) -> None:
    """Raise `ValueError` for a field that has another value than the only one that is right."""
    for name, entry in fixed.items():
        wanted = entry(ours) if callable(entry) else entry
        if given.get(name) not in (None, wanted):
            value = brief(given[name])
            raise ValueError(f"{name} is {value}, but only {wanted!r} is supported; {remedy}")


def words(text: str) -> frozenset[str]:
    """Names in a text."""
    return frozenset(text.split())


def line(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())


@contextmanager
def panics(what: str) -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is no `Exception`, into a `ValueError`."""
    try:
        yield
    except BaseException as error:
        # The class cannot be imported: each library of Rust has its own.
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: the tokenizers library failed: {line(error)[:200]}") from error


def brief(value: Any) -> str:
    """A value in one short line."""
    return reprlib.repr(value)


def count(value: Any, most: int = LARGE) -> int:
    """A size."""
    if is_whole(value) and 0 < value <= most:
        return int(value)
    raise ValueError(f"a whole number from 1 to {most}")


def few(value: Any) -> int:
    """A number of layers or heads."""
    return count(value, MANY)


def number(value: Any) -> float:
    """A positive number."""
    if type(value) in (int, float) and 0 < value < 1e18:
        return float(value)
    raise ValueError("a positive number below 1e18")


def flag(value: Any) -> bool:
    """A choice."""
    if type(value) is bool:
        return value
    raise ValueError("true or false")


def index(value: Any) -> int:
    """Number of a token or of a layer."""
    if is_whole(value) and 0 <= value < LARGE:
        return int(value)
    raise ValueError(f"a whole number from 0 to {LARGE - 1}")


def indices(value: Any) -> tuple[int, ...]:
    """Numbers of tokens or layers, from one or a list."""
    listed = value if isinstance(value, list) else [value]
    if len(listed) > MANY:
        raise ValueError(f"at most {MANY} numbers")
    return tuple(index(entry) for entry in listed)


def some(value: Any) -> tuple[int, ...]:
    """Numbers of layers, at least one."""
    if listed := indices(value):
        return listed
    raise ValueError("at least one number")


def mapping(value: Any) -> dict[str, Any]:
    """A JSON object."""
    if isinstance(value, dict):
        return value
    raise ValueError("an object")


def inner(published: Given, name: str) -> dict[str, Any]:
    """The object under a name; an empty one where there is none."""
    found: dict[str, Any] = checked(name, published.get(name) or {}, mapping)
    return found


def beside(outer: Given, nested: Given) -> Given:
    """Fields of two places as one; `ValueError` for one that has a value in each, and not the same.

    A field that is null is not said.
    """
    inside = {name: value for name, value in nested.items() if value is not None}
    for name, value in inside.items():
        if outer.get(name) not in (None, value):
            raise ValueError(
                f"{name} is {brief(outer[name])} in one place and {brief(value)} in another"
            )
    return {**outer, **inside}


def either(one: tuple[int, ...], other: tuple[int, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    """The one of two lists that is given; `ValueError` where both are, and not the same."""
    if one and other and one != other:
        raise ValueError(f"{' and '.join(names)} say different things; keep one")
    return one or other


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; `ValueError` naming the file where it is broken or another."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} has no JSON object but {brief(content)}")
    return content
