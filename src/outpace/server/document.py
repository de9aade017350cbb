"""OpenAPI document: the parts FastAPI cannot derive, as routes handle raw bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def schema_reference(name: str) -> OpenApiObject:
    return {"$ref": SCHEMA_REFERENCE.format(model=name)}


def answer_responses(
    *statuses: int, media: Sequence[str] = ("application/json",), error: str = "Error"
) -> dict[int | str, OpenApiObject]:
    """Describe the answer of a route, the errors of every route, and further ones."""
    answers: dict[int | str, OpenApiObject] = {200: {"content": {each: {} for each in media}}}
    for status in (401, 403, 408, 413, 421, *statuses):
        schema = schema_reference(error if status in (*statuses, 408, 413) else "Error")
        answers[status] = {"content": {"application/json": {"schema": schema}}}
    return answers


def completion_responses(error: str = "Error") -> dict[int | str, OpenApiObject]:
    """Describe the responses of a route that decodes."""
    media = ("application/json", "text/event-stream")
    return answer_responses(400, 404, 429, 500, 503, media=media, error=error)


def request_body(*models: type[BaseModel]) -> OpenApiObject:
    """Return `openapi_extra` with the body of a route, of one of some models."""
    schemas = [schema_reference(model.__name__) for model in models]
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"anyOf": schemas}}},
        }
    }


def complete_document(document: OpenApiObject, models: Iterable[str]) -> OpenApiObject:
    """Add the schemas and the model names to FastAPI's document."""
    schemas: OpenApiObject = {"Error": ERROR_SCHEMA, "MessagesError": MESSAGES_ERROR_SCHEMA}
    for model in REQUEST_MODELS:
        json_schema = model.model_json_schema(ref_template=SCHEMA_REFERENCE)
        json_schema["properties"]["model"]["enum"] = [*models]
        schemas |= json_schema.pop("$defs", {}) | {model.__name__: json_schema}
    components = document.setdefault("components", {})
    components["schemas"] = schemas
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    return document
