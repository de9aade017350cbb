"""The options of a method as data, for those that show them or read them from elsewhere."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from outpace.methods import METHODS, Method
from outpace.methods.meanings import MEANINGS
from outpace.methods.method import Among, Within


@dataclass(frozen=True, kw_only=True)
class Option:
    """One field of a method.

    Attributes:
        kind: int, float, bool or str.
        words: what it may be instead of a number; all that it may be, where `kind` is str.
        nullable: whether it may be None.
        default: MISSING where one must be given.
        meaning: in a line; empty for a method that is not registered.
        search: what a search tries; None where it leaves the option alone.
    """

    name: str
    kind: type
    words: tuple[str, ...]
    nullable: bool
    default: Any
    meaning: str
    search: Within | Among | None = None

    @property
    def needed(self) -> bool:
        """Whether a method cannot be made without it."""
        return self.default is MISSING


def find_method(name: str) -> type[Method]:
    """A method by name; `ValueError` for an unknown one."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; known are {', '.join(METHODS)}")
    return METHODS[name]


def options_of(method: type[Method]) -> dict[str, Option]:
    """The options of a method by their names."""
    hints = get_type_hints(method, include_extras=True)
    told = next((MEANINGS[name] for name, kind in METHODS.items() if kind is method), {})
    return {
        f.name: option(f.name, hints[f.name], f.default, told.get(f.name, ""))
        for f in fields(method)
    }


def option(name: str, hint: Any, default: Any, meaning: str) -> Option:
    """An option from its annotation."""
    marks = getattr(hint, "__metadata__", ())
    hint = get_args(hint)[0] if marks else hint
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    plain = [part for part in parts if get_origin(part) is not Literal and part is not NoneType]
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    return Option(
        name=name,
        kind=(plain or [str])[0],
        words=tuple(words),
        nullable=NoneType in parts,
        default=default,
        meaning=meaning,
        search=next((mark for mark in marks if isinstance(mark, Within | Among)), None),
    )
