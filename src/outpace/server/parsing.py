"""Parsing of request bodies: complexity limits, and errors that name the invalid field."""

from __future__ import annotations

import re
from reprlib import repr as brief
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from outpace.errors import OptionError
from outpace.server.bounds import requirement
from outpace.server.http_error import HttpError

UNSUPPORTED_FIELDS = {
    "not supported yet": (
        *("audio", "prediction", "verbosity", "best_of"),
        *("web_search_options", "refusal", "functions", "function_call"),
    ),
    "only text is supported": ("modalities",),
    "nothing is stored, so send the whole conversation": ("previous_response_id", "conversation"),
}

REFUSAL_REASONS = {name: reason for reason, names in UNSUPPORTED_FIELDS.items() for name in names}
"""Fields of OpenAI's with unsupported values, and the reason given."""

RequestType = TypeVar("RequestType", bound=BaseModel)

UNION_TAG = re.compile(
    r"str|int|float|bool|none|NamedChoice|\[key\]|(list|dict|constrained-|function-|literal).*"
)

JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)

MAX_UNCHECKED_BYTES = 2**16
"""Size up to which every body is fast to parse."""

VALUE_LIMITS = {
    "values": (b",", 2**18),
    "lists and objects": (b"[{", 2**14),
    "fields": (b":", 2**14),
}
"""Maximum counts in a body, and the bytes outside of strings that are counted."""


def check_body_complexity(body: bytes) -> None:
    """Raise `HttpError` for a body that would take long to parse."""
    if len(body) <= MAX_UNCHECKED_BYTES:
        return
    stripped = JSON_STRING.sub(b"", body)
    for what, (marks, maximum) in VALUE_LIMITS.items():
        if sum(stripped.count(mark) for mark in marks) > maximum:
            raise HttpError(
                400, f"the body must have at most {maximum} {what}", code="too_many_values"
            )


def parse_request(kind: type[RequestType], body: bytes) -> RequestType:
    """Return a request from its JSON.

    Raises:
        HttpError: If a field is invalid; `param` is its path.
    """
    check_body_complexity(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise validation_http_error(error) from None


def validation_http_error(error: ValidationError) -> HttpError:
    """Return the first error, reported for the deepest field where several types are allowed.

    Unsupported features come first, since other fields may be invalid only because of them.
    """
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return HttpError(400, f"the body must be valid JSON: {first['msg']}")
    related = [each for each in errors if each["loc"][:1] == first["loc"][:1]]
    location = max(
        map(error_path, related),
        key=lambda location: (unsupported_depth(location) is not None, len(location)),
    )
    related = [each for each in related if error_path(each) == location]
    # If one of the types matches, report only its other errors.
    worst = [each for each in related if not each["type"].endswith("_type")] or related
    message = " or ".join(dict.fromkeys(map(pydantic_message, worst)))
    cause = first.get("ctx", {}).get("error")
    if not location and isinstance(
        cause, OptionError
    ):  # raised by a validator of the whole request
        return HttpError(400, str(cause), param=cause.param)
    if not location:
        return HttpError(400, "the body must be a JSON object")
    if (end := unsupported_depth(location)) is not None:
        location = location[: end + 1]
    param = ".".join(map(str, location))
    return HttpError(400, f"{param}: {describe_error(location, worst[0], message)}", param=param)


def unsupported_depth(place: tuple[str | int, ...]) -> int | None:
    """Return the depth of an unsupported field on a path, or None."""
    depth = 2 if place[:1] == ("messages",) else 0
    step = place[depth] if len(place) > depth else None
    return depth if step in REFUSAL_REASONS or (depth and step == "role") else None


def pydantic_message(error: Any) -> str:
    """Return pydantic's message, reworded for lists of the wrong length."""
    bounds = {"too_long": "at most {max_length}", "too_short": "at least {min_length}"}
    if (bound := bounds.get(error["type"])) is None:
        return str(error["msg"])
    count = error["ctx"]["actual_length"]
    actual = "more" if count is None else count  # pydantic reports no count for objects
    return f"must have {bound.format(**error['ctx'])} entries, got {actual}"


def describe_error(place: tuple[str | int, ...], error: Any, message: str) -> str:
    """Return what is wrong with a field."""
    if error["type"] == "extra_forbidden":
        return "unknown field"
    if error["type"] == "missing":
        return "is required"
    if unsupported_depth(place) is not None and place[-1] in REFUSAL_REASONS:
        return f"{REFUSAL_REASONS[str(place[-1])]}; leave the field out"
    if place[-1] == "role" and error["input"] == "function":
        return "'function' is not supported yet; use the role 'tool'"
    if place[-1] == "type":
        return f"{brief(error['input'])} is not supported yet"
    text = requirement(message.removeprefix("Value error, "))
    if error["type"] in ("too_long", "too_short"):
        return text
    return f"{text}, got {brief(error['input'])}"


def error_path(error: Any) -> tuple[str | int, ...]:
    """Return the location of an error without the union types that pydantic tried."""
    place = error["loc"]
    inner = place[:-1] if error["type"] in ("extra_forbidden", "missing") else place
    fields = tuple(step for step in inner if isinstance(step, int) or not UNION_TAG.fullmatch(step))
    return fields + place[len(inner) :]
