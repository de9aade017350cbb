"""The options of a method as data, for those that show them or read them from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from outpace.decoding import OptionError
from outpace.methods import METHODS, Method
from outpace.methods.method import Among, Within

Named = Method | str | tuple[str, Mapping[str, Any]]
"""A method, its name, or its name and options."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One field of a method.

    Attributes:
        kind: int, float, bool or str.
        words: what it may be instead of a number; all that it may be, where `kind` is str.
        nullable: whether it may be None.
        default: MISSING where one must be given.
        meaning: in a line; the text among the marks of its field.
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
        message = f"method: unknown method {name!r}; known are {', '.join(METHODS)}"
        raise OptionError("method", name, message)
    return METHODS[name]


def method_of(given: Named) -> Method:
    """A method from what names it. Raises `ValueError` as `make_method` does."""
    if isinstance(given, Method):
        return given
    pair = (given, {}) if isinstance(given, str) else given
    match pair:
        case [str(name), Mapping() as options]:
            return make_method(name, options)
    raise OptionError(
        "method",
        given,
        f"method must be a Method such as Autoregressive(), a name such as 'autoregressive', or a "
        f"name and a mapping of options, not {given!r}",
    )


def make_method(
    name: str, options: Mapping[str, Any], spelling: Callable[[str], str] = str
) -> Method:
    """A method by its name, with options by theirs, which messages have in some `spelling`.

    Raises `ValueError` for an unknown method, an option that it does not have, one that it needs,
    and a value that it does not take.
    """
    kind = find_method(name)
    known = options_of(kind)
    if unknown := [option for option in options if option not in known]:
        has = f"known are {', '.join(sorted(known))}" if known else "it has none"
        message = f"{unknown[0]}: method {name!r} has no option {unknown[0]}; {has}"
        raise OptionError(unknown[0], options[unknown[0]], message)
    needed = [option.name for option in known.values() if option.needed]
    if missing := [option for option in needed if option not in options]:
        spelled = [spelling(option) for option in missing]
        message = f"{spelled[0]} is missing: method {name!r} needs {', '.join(spelled)}"
        raise OptionError(missing[0], None, message)
    return kind(**options)


def options_of(method: type[Method]) -> dict[str, Option]:
    """The options of a method by their names."""
    hints = get_type_hints(method, include_extras=True)
    return {f.name: option(f.name, hints[f.name], f.default) for f in fields(method)}


def option(name: str, hint: Any, default: Any) -> Option:
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
        meaning=next((mark for mark in marks if isinstance(mark, str)), ""),
        search=next((mark for mark in marks if isinstance(mark, Within | Among)), None),
    )
