"""Request fields that each method supports."""

from __future__ import annotations

from outpace.api.options import MOST_TOKENS, REQUEST
from outpace.methods import Method
from outpace.server.constrained import at
from outpace.server.fault import Fault
from outpace.server.schema import Asked

OPTIONS = {field: option for option in REQUEST.values() for field in option.fields}
"""Options by the request fields that set them."""

LENGTHS = tuple(o.name for o in REQUEST.values() if (o.info.bounds or {}).get("le") == MOST_TOKENS)
"""Options that limit the tokens of an answer."""

SEQUENTIAL = tuple(field for field, option in OPTIONS.items() if option.info.sequential)
"""Fields that need left-to-right decoding: penalties and grammars depend on all earlier tokens."""

EVERY = (
    *("n", "max_completion_tokens", "response_format", "structured_outputs"),
    *(field for field in OPTIONS if "." not in field and field not in SEQUENTIAL),
    *("stream", "stream_options", "outpace.trace"),
)
"""Fields that every method supports."""

SCATTERED = ("outpace.provisional",)
"""Fields supported only by methods that choose tokens out of order."""

AHEAD = ("outpace.fill",)
"""Fields supported only by methods whose holes attend to later text."""

NEUTRAL = {field: OPTIONS[field].default for field in SEQUENTIAL}
"""Values with which a field has no effect."""


def field_of(option: str) -> str:
    """Return the request field of an option; other names are returned unchanged."""
    names = REQUEST[option].fields if option in REQUEST else ()
    return names[0] if names else option


def fields_of(method: Method) -> tuple[str, ...]:
    """Return the optional fields that a method supports."""
    ordered = SEQUENTIAL if method.sequential else SCATTERED
    return EVERY + ordered + (AHEAD if method.sees_ahead else ())


def check_fields(request: Asked, method: Method) -> None:
    """Raise `HttpError` for a field that the method does not support."""
    supported = fields_of(method)
    for name in (*SEQUENTIAL, *SCATTERED, *AHEAD):
        used = at(request, name) not in (None, NEUTRAL.get(name, False))
        if used and name not in supported:
            raise Fault(400, f"{name}: not supported by {type(method).__name__}", param=name)
