"""Options of a server and its models. Imports no web framework: flags exist without one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from outpace.api.options import Info
from outpace.field_types import Bounds, PositiveInt

Seconds = Annotated[float, Bounds(0, 86400, above=True)]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of a server as a whole, shared by flags and TOML."""

    host: Annotated[str, "Address to listen on.", Info(group="server", usual=True)] = "127.0.0.1"
    port: Annotated[
        int, Bounds(0, 65535), "Port; 0 for any free one.", Info(group="server", usual=True)
    ] = 8000
    api_key: Annotated[str | None, "Key that clients must send.", Info(group="server")] = None
    api_key_file: Annotated[
        str | None, "File that contains the key.", Info(group="server", typed=Path)
    ] = None
    insecure: Annotated[
        bool, "Allow other addresses than localhost without a key.", Info(group="server")
    ] = False
    max_waiting: Annotated[
        int,
        Bounds(0),
        "Maximum number of waiting requests per model. Running ones do not count.",
        Info(group="server", usual=True),
    ] = 256
    read_seconds: Annotated[
        Seconds,
        "Time limit for a client to send its headers, to send its body, and to read what is "
        "written to it.",
    ] = 30.0
    drain_seconds: Annotated[
        float,
        Bounds(0, 86400),
        "Seconds that running requests may take after SIGTERM.",
        Info(group="server", usual=True),
    ] = 30.0
    step_seconds: Annotated[
        float,
        Bounds(1, 86400),
        "Maximum seconds of a layer of 4,096 rows; a longer one ends the process.",
        Info(group="server", usual=True),
    ] = 60.0
    verbose: Annotated[
        bool, "Also log requests, and the choices for this processor.", Info(group="server")
    ] = False
    log_format: Annotated[
        Literal["text", "json"],
        "Format of the log: text, or json, which includes requests.",
        Info(group="server", typed=str, usual=True),
    ] = "text"


@dataclass(frozen=True, kw_only=True)
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
