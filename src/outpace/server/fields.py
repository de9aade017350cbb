"""Request fields that each method supports."""

from __future__ import annotations

from outpace.api.options import MAX_ANSWER_TOKENS, REQUEST_OPTIONS
from outpace.decoding import CAUSAL_KINDS
from outpace.methods import Method
from outpace.server.constraint_fields import get_field
from outpace.server.http_error import HttpError
from outpace.server.schema import BaseRequest, CompletionRequest

OPTIONS_BY_FIELD = {field: option for option in REQUEST_OPTIONS.values() for field in option.fields}
"""Options by the request fields that set them."""

LENGTH_OPTIONS = tuple(
    o.name for o in REQUEST_OPTIONS.values() if (o.info.bounds or {}).get("le") == MAX_ANSWER_TOKENS
)
"""Options that limit the tokens of an answer."""

SEQUENTIAL_FIELDS = tuple(
    field for field, option in OPTIONS_BY_FIELD.items() if option.info.sequential
)
"""Fields that need left-to-right decoding: penalties and grammars depend on all earlier tokens."""

CAUSAL_FIELDS = ("prompt_logprobs",)
"""Fields supported only by methods of causal models."""

NOT_COMMON = SEQUENTIAL_FIELDS + CAUSAL_FIELDS

COMMON_FIELDS = (
    *("n", "max_completion_tokens", "response_format", "structured_outputs"),
    *("tools", "tool_choice", "parallel_tool_calls", "top_logprobs"),
    *(field for field in OPTIONS_BY_FIELD if "." not in field and field not in NOT_COMMON),
    *("stream", "stream_options", "outpace.trace"),
)
"""Fields that every method supports."""

OUT_OF_ORDER_FIELDS = ("outpace.provisional",)
"""Fields supported only by methods that choose tokens out of order."""

INFILL_FIELDS = ("outpace.fill",)
"""Fields supported only by methods whose holes attend to later text."""

NEUTRAL_VALUES = {field: OPTIONS_BY_FIELD[field].default for field in NOT_COMMON}
"""Values with which a field has no effect."""


def option_field(option: str) -> str:
    """Return the request field of an option; other names are returned unchanged."""
    names = REQUEST_OPTIONS[option].fields if option in REQUEST_OPTIONS else ()
    return names[0] if names else option


def supported_fields(method: Method) -> tuple[str, ...]:
    """Return the optional fields that a method supports."""
    ordered = SEQUENTIAL_FIELDS if method.is_sequential else OUT_OF_ORDER_FIELDS
    causal = CAUSAL_FIELDS if set(method.target_kinds) <= set(CAUSAL_KINDS) else ()
    return COMMON_FIELDS + ordered + causal + (INFILL_FIELDS if method.sees_ahead else ())


def check_supported_fields(request: BaseRequest, method: Method) -> None:
    """Raise `HttpError` for a field that the method does not support."""
    supported = {*supported_fields(method)}
    echoes = isinstance(request, CompletionRequest) and request.echoes_scores
    if echoes and not supported.issuperset(CAUSAL_FIELDS):
        message = (
            f"echo: log-probabilities of the prompt are not supported by {type(method).__name__}; "
            "omit echo or logprobs"
        )
        raise HttpError(400, message, param="echo")
    for name in (*NOT_COMMON, *OUT_OF_ORDER_FIELDS, *INFILL_FIELDS):
        used = get_field(request, name) not in (None, NEUTRAL_VALUES.get(name, False))
        if used and name not in supported:
            raise HttpError(400, f"{name}: not supported by {type(method).__name__}", param=name)
