"""Declared options as fields of pydantic models of requests."""

from __future__ import annotations

from math import inf
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from outpace.api.options import option_info
from outpace.field_types import Option


def convert_whole_number(value: object) -> object:
    """Return an integral float as an integer, since JSON does not distinguish them."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(convert_whole_number)]


def bounded_type(option: Option) -> Any:
    """Return the type of an option with its bounds in requests; optional if it is so in Python."""
    ((plain, bounds),) = option.types.items() or [(Literal[option.words], None)]
    kind: Any = Whole if plain is int else plain
    if (bounds := option_info(option).limits or bounds) is not None:
        low, high = "gt" if bounds.above else "ge", "lt" if bounds.below else "le"
        ends: dict[str, Any] = {low: bounds.low}
        if bounds.high != inf:
            ends[high] = bounds.high
        kind = Annotated[kind, Field(**ends)]
    return kind | None if option.is_nullable else kind
