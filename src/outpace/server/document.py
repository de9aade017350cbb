"""OpenAPI document: the parts FastAPI cannot derive, as routes handle raw bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from outpace.server.http_error import ERROR_SCHEMA
from outpace.server.messages import MESSAGES_ERROR_SCHEMA, CountTokensRequest, MessagesRequest
from outpace.server.responses import ResponsesRequest
from outpace.server.schema import ChatRequest, CompletionRequest
from outpace.server.tokens import DetokenizeRequest

OpenApiObject = dict[str, Any]

REQUEST_MODELS = (
    *(ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest),
    *(CountTokensRequest, DetokenizeRequest),
)
SCHEMA_REFERENCE = "#/components/schemas/{model}"

STATUS_DESCRIPTIONS = {
    400: "The request is invalid; `param` names the field.",
    401: "No valid API key.",
    403: "The request comes from a page of another site.",
    404: "Unknown model or path.",
    405: "The path does not support this HTTP method.",
    408: "The body was not received in time.",
    413: "The body is too large.",
    421: "The request was meant for another host.",
    429: "Too many requests are pending; retry later.",
    431: "The headers are too large.",
    500: "Decoding failed.",
    503: "The server is shutting down, has failed, or cannot load the model.",
}


def schema_reference(name: str) -> OpenApiObject:
    """Return a reference to a named schema of the document."""
    return {"$ref": SCHEMA_REFERENCE.format(model=name)}


def media_content(media_type: str, schema: OpenApiObject) -> OpenApiObject:
    """Return the content entry for one media type."""
    return {"content": {media_type: {"schema": schema}}}


def error_responses(*statuses: int, error: str = "Error") -> dict[int | str, OpenApiObject]:
    """Describe error responses: those of every route, and further statuses.

    `error` is the schema of errors that a route itself returns.
    """
    described = (
        (status, STATUS_DESCRIPTIONS[status]) for status in (401, 403, 408, 413, 421, *statuses)
    )
    return {
        status: {
            "description": meaning,
            **media_content(
                "application/json",
                schema_reference(error if status in (*statuses, 408, 413) else "Error"),
            ),
        }
        for status, meaning in described
    }


def completion_responses(name: str, error: str = "Error") -> dict[int | str, OpenApiObject]:
    """Describe the responses of a route that decodes."""
    both = media_content("application/json", schema_reference(name))["content"]
    both |= media_content("text/event-stream", {})["content"]
    ok = {"description": "The answer, whole or streamed.", "content": both}
    return {200: ok, **error_responses(400, 404, 429, 500, 503, error=error)}


def request_body(*models: type[BaseModel]) -> OpenApiObject:
    """Return `openapi_extra` with the body of a route, of one of some models."""
    schemas = [schema_reference(model.__name__) for model in models]
    return {
        "requestBody": {
            "required": True,
            **media_content(
                "application/json", schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
            ),
        }
    }


def complete_document(document: OpenApiObject, models: Iterable[str]) -> OpenApiObject:
    """Add the schemas and the model names to FastAPI's document."""
    schemas: OpenApiObject = {"Error": ERROR_SCHEMA, **ANSWER_SCHEMAS}
    for model in REQUEST_MODELS:
        json_schema = model.model_json_schema(ref_template=SCHEMA_REFERENCE)
        json_schema["properties"]["model"]["enum"] = [*models]
        schemas |= json_schema.pop("$defs", {}) | {model.__name__: json_schema}
    components = document.setdefault("components", {})
    components["schemas"] = schemas
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    return document


def object_schema(**properties: Any) -> OpenApiObject:
    """Return the schema of an object with all of these properties."""
    return {"type": "object", "required": [*properties], "properties": properties}


STRING_SCHEMA, INTEGER_SCHEMA, OPTIONAL_OBJECT_SCHEMA = (
    {"type": "string"},
    {"type": "integer"},
    {"type": ["object", "null"]},
)
FINISH_REASON_SCHEMA = {"enum": ["stop", "length", "tool_calls", "cancelled"]}
USAGE_SCHEMA = object_schema(
    prompt_tokens=INTEGER_SCHEMA, completion_tokens=INTEGER_SCHEMA, total_tokens=INTEGER_SCHEMA
)
STATISTICS_SCHEMA = {"type": ["object", "array"]}
PROMPT_LOGPROBS_SCHEMA = {"type": "array", "items": OPTIONAL_OBJECT_SCHEMA}


def answer_schema(**choice: Any) -> OpenApiObject:
    """Return the schema of a whole answer."""
    choice_schema = object_schema(
        index=INTEGER_SCHEMA,
        **choice,
        logprobs=OPTIONAL_OBJECT_SCHEMA,
        finish_reason=FINISH_REASON_SCHEMA,
    )
    schema = object_schema(
        id=STRING_SCHEMA,
        object=STRING_SCHEMA,
        created=INTEGER_SCHEMA,
        model=STRING_SCHEMA,
        choices={"type": "array", "items": choice_schema},
        usage=USAGE_SCHEMA,
        outpace=STATISTICS_SCHEMA,
    )
    holder = schema if "message" in choice else choice_schema
    holder["properties"]["prompt_logprobs"] = PROMPT_LOGPROBS_SCHEMA  # only if requested
    return schema


MODEL_SCHEMA = object_schema(
    id=STRING_SCHEMA,
    object={"const": "model"},
    created=INTEGER_SCHEMA,
    owned_by=STRING_SCHEMA,
    outpace=object_schema(),
)
CALL_SCHEMA = object_schema(
    id=STRING_SCHEMA,
    type={"const": "function"},
    function=object_schema(name=STRING_SCHEMA, arguments=STRING_SCHEMA),
)
MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": STRING_SCHEMA,
        "content": {"type": ["string", "null"]},
        "reasoning_content": STRING_SCHEMA,
        "tool_calls": {"type": "array", "items": CALL_SCHEMA},
    },
}
ANSWER_SCHEMAS: OpenApiObject = {
    "ChatCompletion": answer_schema(message=MESSAGE_SCHEMA),
    "Completion": answer_schema(text=STRING_SCHEMA),
    "Response": object_schema(
        id=STRING_SCHEMA,
        object={"const": "response"},
        created_at=INTEGER_SCHEMA,
        status={"enum": ["completed", "incomplete"]},
        model=STRING_SCHEMA,
        output={"type": "array", "items": {"type": "object", "required": ["id", "type"]}},
        usage={"type": "object"},
    ),
    "Message": object_schema(
        id=STRING_SCHEMA,
        type={"const": "message"},
        role={"const": "assistant"},
        model=STRING_SCHEMA,
        content={"type": "array", "items": {"type": "object", "required": ["type"]}},
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        stop_sequence={"type": ["string", "null"]},
        usage=object_schema(input_tokens=INTEGER_SCHEMA, output_tokens=INTEGER_SCHEMA),
    ),
    "MessagesError": MESSAGES_ERROR_SCHEMA,
    "Model": MODEL_SCHEMA,
    "Models": object_schema(
        object={"const": "list"}, data={"type": "array", "items": schema_reference("Model")}
    ),
    "Tokens": object_schema(
        count=INTEGER_SCHEMA,
        max_model_len=INTEGER_SCHEMA,
        tokens={"type": "array", "items": INTEGER_SCHEMA},
    ),
    "MessageTokens": object_schema(input_tokens=INTEGER_SCHEMA),
    "Prompt": object_schema(prompt=STRING_SCHEMA),
    "Status": object_schema(status=STRING_SCHEMA),
}
