"""Options of a served model. Imports no web framework, so that the flags exist without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from outpace.api.options import Info


@dataclass(kw_only=True)
class ServeOptions:
    """Options of a served model, shared by flags and TOML."""

    max_tokens: Annotated[
        int | None,
        Info(
            "Maximum tokens of an answer.", "serving", usual="rest of the context", bounds={"ge": 1}
        ),
    ] = None
    lazy: Annotated[
        bool, Info("Load models when they are first requested, and unload idle ones.", "serving")
    ] = False
    keep: Annotated[
        str | None,
        Info(
            "Time without requests after which a lazy model is unloaded: 90s, 10m, 2h or 1d.",
            "serving",
            usual="10m",
        ),
    ] = None
    tools: Annotated[
        Literal["any", "template"],
        Info(
            "Models that take tools: any, or those with a template that describes them.",
            "serving",
            typed=str,
            shows=True,
        ),
    ] = "any"
