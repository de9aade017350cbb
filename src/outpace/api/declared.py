"""Options as data: what stands beside the field that declares one, for flags, requests and TOML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from functools import cache
from types import MappingProxyType, NoneType
from typing import Any, Union, get_args, get_type_hints


@dataclass(frozen=True)
class Info:
    """What an option is outside of Python; a mark beside its field.

    Attributes:
        help: of its flag; None where it has none, or commands word their own.
        group: flags that commands take together.
        usual: the default in words, where no value stands for it.
        shows: whether help shows the default.
        flag: name of its flag, where another.
        typed: type of its flag, where another: a file, or a list of texts.
        metavar: how a value of its flag is written.
        fields: paths of its fields in a request; None for the name of the option alone.
        bounds: what pydantic holds plain values to in requests and TOML; None where it has a
            type of its own there, or none.
        least: lower bound in Python, where the only upper one is that of every number.
        sequential: whether it needs tokens that are chosen from left to right.
    """

    help: str | None = None
    group: str | None = None
    _: KW_ONLY
    usual: str | None = None
    shows: bool = False
    flag: str | None = None
    typed: Any = None
    metavar: str | None = None
    fields: tuple[str, ...] | None = None
    bounds: Mapping[str, float] | None = None
    least: float | None = None
    sequential: bool = False


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One option: its name, type, default and the rest.

    Attributes:
        plain: its type without None.
    """

    name: str
    kind: Any
    default: Any
    info: Info = field(default_factory=Info)

    @property
    def plain(self) -> Any:
        parts = tuple(part for part in get_args(self.kind) if part is not NoneType)
        return Union[parts] if NoneType in get_args(self.kind) else self.kind  # noqa: UP007

    @property
    def fields(self) -> tuple[str, ...]:
        """Paths of its fields in a request."""
        return (self.name,) if self.info.fields is None else self.info.fields


@cache
def declared(kind: type) -> Mapping[str, Declared]:
    """The options of a dataclass by their names."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for each in fields(kind):
        hint, info = get_args(hints[each.name])
        default = each.default if each.default_factory is MISSING else each.default_factory()
        found[each.name] = Declared(name=each.name, kind=hint, default=default, info=info)
    return MappingProxyType(found)
