"""Declared options: field metadata from which flags, request fields and TOML keys follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from functools import cache
from types import MappingProxyType, NoneType
from typing import Any, Union, get_args, get_type_hints


@dataclass(frozen=True)
class Info:
    """Metadata of an option, attached to its field by `Annotated`.

    Attributes:
        help: Help text of its flag; None if it has no flag, or commands have their own text.
        group: Name of the group of flags that it belongs to.
        usual: Description of the default, if no value represents it.
        shows: Whether the help shows the default.
        flag: Name of its flag, if different.
        typed: Type of its flag, if different: a file, or a list of strings.
        metavar: Placeholder of a value in the help.
        fields: Paths of its fields in a request; None for the option's name alone.
        bounds: Bounds that pydantic checks in requests and TOML; None if it has its own type there,
            or no field.
        least: Lower bound in Python, where the upper bound is that of all numbers.
        sequential: Whether it needs tokens that are chosen from left to right.
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
class DeclaredOption:
    """One option of a dataclass.

    Attributes:
        name: Name of the field.
        kind: Type of the field.
        default: Default value.
        info: Metadata.
    """

    name: str
    kind: Any
    default: Any
    info: Info = field(default_factory=Info)

    @property
    def plain(self) -> Any:
        """Type of a value, without None."""
        parts = tuple(part for part in get_args(self.kind) if part is not NoneType)
        return Union[parts] if NoneType in get_args(self.kind) else self.kind  # noqa: UP007

    @property
    def fields(self) -> tuple[str, ...]:
        """Paths of its fields in a request."""
        return (self.name,) if self.info.fields is None else self.info.fields


@cache
def list_options(kind: type) -> Mapping[str, DeclaredOption]:
    """Return the options of a dataclass by name."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for each in fields(kind):
        hint, info = get_args(hints[each.name])
        default = each.default if each.default_factory is MISSING else each.default_factory()
        found[each.name] = DeclaredOption(name=each.name, kind=hint, default=default, info=info)
    return MappingProxyType(found)
