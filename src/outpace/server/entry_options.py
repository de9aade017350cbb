"""Options of a served model other than its method and those of its `LLM`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from outpace.api.declared import Info, list_options


@dataclass(kw_only=True)
class ServeOptions:
    """Options of a served model, shared by flags and TOML."""

    max_tokens: Annotated[
        int | None,
        Info(
            "Maximum tokens of an answer.",
            "serving",
            usual="rest of the context",
            bounds={"ge": 1},
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


SERVE_OPTIONS = list_options(ServeOptions)
"""Options of a served model by name."""
