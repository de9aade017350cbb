"""Values of a recipe against the annotations of the dataclass that they are fields of."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

PLAIN: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    NoneType: "nothing",
}
"""Types in the words of a message."""

LARGE = 1e30
"""Beyond every number of a recipe; what is infinite or no number is not below it."""


def check_values(where: str, kind: type[Any], values: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a value that is none of what its field may be.

    A list stands for a tuple; a number must be finite, and may be whole where any may stand.
    """
    hints = get_type_hints(kind)
    for name, value in values.items():
        if not fits(value, hints[name]):
            raise ValueError(
                f"{where}: {name} must be {described(hints[name])}, not {reprlib.repr(value)}"
            )


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says."""
    parts, of = get_args(hint), get_origin(hint)
    if of in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if of is Literal:
        return isinstance(value, str) and value in parts
    if of is tuple:
        if not isinstance(value, list | tuple):
            return False
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(value) == len(kinds) and all(map(fits, value, kinds))
    if hint is float:
        return type(value) in (int, float) and -LARGE < value < LARGE
    if hint in PLAIN:
        return type(value) is hint
    return isinstance(value, of or hint)


def described(hint: Any) -> str:
    """An annotation in words."""
    parts, of = get_args(hint), get_origin(hint)
    if of in (Union, UnionType):
        return " or ".join(described(part) for part in parts if part is not NoneType)
    if of is Literal:
        return " or ".join(parts)
    if of is tuple:
        if parts[-1] is Ellipsis:
            return f"a list, each of it {described(parts[0])}"
        return f"a list of {len(parts)}, each of it {described(parts[0])}"
    return PLAIN.get(hint, "a table")
