"""Options of a served model. Imports no web framework, so that the flags exist without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from outpace.api.options import Info
from outpace.field_types import PositiveInt


@dataclass(kw_only=True)
class ServeOptions:
    """Options of a served model, shared by flags and TOML."""

    max_tokens: Annotated[
        PositiveInt | None,
        "Maximum tokens of an answer.",
        Info(group="serving", usual="rest of the context"),
    ] = None
    lazy: Annotated[
        bool,
        "Load models when they are first requested, and unload idle ones.",
        Info(group="serving"),
    ] = False
    keep: Annotated[
        str | None,
        "Time without requests after which a lazy model is unloaded: 90s, 10m, 2h or 1d.",
        Info(group="serving", usual="10m"),
    ] = None
    tools: Annotated[
        Literal["any", "template"],
        "Models that take tools: any, or those with a template that describes them.",
        Info(group="serving", typed=str, shows=True),
    ] = "any"
