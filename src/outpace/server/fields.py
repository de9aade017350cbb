"""Which fields of a request a method supports: what is refused, documented and listed."""

from __future__ import annotations

from outpace.api.options import MOST_TOKENS, REQUEST
from outpace.methods import Method
from outpace.server.constrained import at
from outpace.server.fault import Fault
from outpace.server.schema import Asked

OPTIONS = {field: option for option in REQUEST.values() for field in option.fields}
"""Options by the fields that give them."""

LENGTHS = tuple(o.name for o in REQUEST.values() if (o.info.bounds or {}).get("le") == MOST_TOKENS)
"""Options that count tokens of an answer."""

SEQUENTIAL = tuple(field for field, option in OPTIONS.items() if option.info.sequential)
"""What needs tokens that are chosen from left to right: a penalty and a grammar look at all before
their slot."""

EVERY = (
    *("n", "max_completion_tokens", "response_format", "structured_outputs"),
    *(field for field in OPTIONS if "." not in field and field not in SEQUENTIAL),
    *("stream", "stream_options", "outpace.trace"),
)
"""What every method supports."""

SCATTERED = ("outpace.provisional",)
"""What only methods have that choose tokens out of order."""

AHEAD = ("outpace.fill",)
"""What only methods have whose holes see what stands behind them."""

NEUTRAL = {field: OPTIONS[field].default for field in SEQUENTIAL}
"""Values with which a field says nothing."""


def field_of(option: str) -> str:
    """The field that gives an option; of another name, such as that of a part, the name itself."""
    found = REQUEST[option].fields if option in REQUEST else ()
    return found[0] if found else option


def fields_of(method: Method) -> tuple[str, ...]:
    """The fields that a method supports, beside those that say what is asked for."""
    ordered = SEQUENTIAL if method.sequential else SCATTERED
    return EVERY + ordered + (AHEAD if method.sees_ahead else ())


def check_fields(asked: Asked, method: Method) -> None:
    """Raise `Fault` that names a field which the method does not support."""
    supported = fields_of(method)
    for name in (*SEQUENTIAL, *SCATTERED, *AHEAD):
        used = at(asked, name) not in (None, NEUTRAL.get(name, False))
        if used and name not in supported:
            raise Fault(400, f"{name}: {type(method).__name__} does not support it", param=name)
