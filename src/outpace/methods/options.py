"""The options of a method as data, for interfaces that list or parse them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from outpace.decoding import OptionError
from outpace.methods import METHODS, Method
from outpace.methods.method import SharesText

MethodSpec = Method | str | tuple[str, Mapping[str, Any]]
"""A method, its name or "auto", or its name and options."""

AUTO_METHOD = "auto"
"""Name that stands for the default method of a model."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a method.

    Attributes:
        kind: int, float, bool or str.
        words: allowed words, next to numbers; all allowed values where `kind` is str.
        nullable: whether it may be None.
        default: default value; MISSING for a required option.
        meaning: one-line description, from the annotation of the field.
        shares_text: whether it shares text between requests.
    """

    name: str
    kind: type
    words: tuple[str, ...]
    nullable: bool
    default: Any
    meaning: str
    shares_text: bool = False

    @property
    def is_required(self) -> bool:
        return self.default is MISSING


def find_method(name: str) -> type[Method]:
    """Return the class of a method; raise `ValueError` for an unknown name."""
    if name not in METHODS:
        message = f"method: unknown method {name!r}; available: {', '.join(METHODS)}"
        raise OptionError("method", name, message)
    return METHODS[name]


def resolve_method(spec: MethodSpec) -> Method:
    """Return a method from its specification; raise `ValueError` for an invalid one."""
    if isinstance(spec, Method):
        return spec
    pair = (spec, {}) if isinstance(spec, str) else spec
    match pair:
        case [str(name), Mapping() as options]:
            return make_method(name, options)
    raise OptionError(
        "method",
        spec,
        f"method must be a Method such as Autoregressive(), a name such as 'autoregressive', or a "
        f"name and a mapping of options, got {spec!r}",
    )


def make_method(
    name: str, options: Mapping[str, Any], spelling: Callable[[str], str] = str
) -> Method:
    """Return a method with the given options.

    Args:
        name: name of the method.
        options: values by name.
        spelling: how an option is written in messages.

    Raises:
        ValueError: an unknown method or option, a missing option, or an invalid value.
    """
    method = find_method(name)
    known = method_options(method)
    if unknown := [option for option in options if option not in known]:
        has = f"available: {', '.join(sorted(known))}" if known else "it has none"
        message = f"{unknown[0]}: method {name!r} has no option {unknown[0]}; {has}"
        raise OptionError(unknown[0], options[unknown[0]], message)
    required = [option.name for option in known.values() if option.is_required]
    if missing := [option for option in required if option not in options]:
        spelled = [spelling(option) for option in missing]
        message = f"{spelled[0]} is missing: method {name!r} needs {', '.join(spelled)}"
        raise OptionError(missing[0], None, message)
    return method(**options)


def method_options(method: type[Method]) -> dict[str, Option]:
    """Return the options of a method by name, those of its base classes last."""
    hints = get_type_hints(method, include_extras=True)
    defaults = {field.name: field.default for field in fields(method)}
    names = [name for kind in method.__mro__ for name in vars(kind).get("__annotations__", ())]
    return {
        name: make_option(name, hints[name], defaults[name])
        for name in dict.fromkeys(names)
        if name in defaults
    }


def make_option(name: str, hint: Any, default: Any) -> Option:
    marks = getattr(hint, "__metadata__", ())
    hint = get_args(hint)[0] if marks else hint
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    plain = [part for part in types if get_origin(part) is not Literal and part is not NoneType]
    words = [word for part in types if get_origin(part) is Literal for word in get_args(part)]
    return Option(
        name=name,
        kind=(plain or [str])[0],
        words=tuple(words),
        nullable=NoneType in types,
        default=default,
        meaning=next((mark for mark in marks if isinstance(mark, str)), ""),
        shares_text=any(isinstance(mark, SharesText) for mark in marks),
    )
