"""OpenAPI document: the parts FastAPI cannot derive, as routes handle raw bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from outpace.server.fault import ENVELOPE
from outpace.server.schema import ChatRequest, CompletionRequest

Object = dict[str, Any]
REFERENCE = "#/components/schemas/{model}"

MEANINGS = {
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
    503: "The server is shutting down, or has failed.",
}


def schema(name: str) -> Object:
    """Return a reference to a named schema of the document."""
    return {"$ref": REFERENCE.format(model=name)}


def content(media_type: str, schema: Object) -> Object:
    """Return the content entry for one media type."""
    return {"content": {media_type: {"schema": schema}}}


def faults(*statuses: int) -> dict[int | str, Object]:
    """Describe error responses: those of every route, and further statuses."""
    described = ((status, MEANINGS[status]) for status in (401, 403, 408, 413, 421, *statuses))
    return {
        status: {"description": meaning, **content("application/json", schema("Error"))}
        for status, meaning in described
    }


def answers(name: str) -> dict[int | str, Object]:
    """Describe the responses of a route that decodes."""
    both = content("application/json", schema(name))["content"]
    both |= content("text/event-stream", {})["content"]
    ok = {"description": "The answer, whole or streamed.", "content": both}
    return {200: ok, **faults(400, 404, 429, 500, 503)}


def body(model: type[BaseModel]) -> Object:
    """Return `openapi_extra` with the body of a route."""
    return {
        "requestBody": {"required": True, **content("application/json", schema(model.__name__))}
    }


def completed(document: Object, models: Iterable[str]) -> Object:
    """Add the schemas and the model names to FastAPI's document."""
    schemas: Object = {"Error": ENVELOPE, **ANSWERS}
    for model in (ChatRequest, CompletionRequest):
        json_schema = model.model_json_schema(ref_template=REFERENCE)
        json_schema["properties"]["model"]["enum"] = [*models]
        schemas |= json_schema.pop("$defs", {}) | {model.__name__: json_schema}
    components = document.setdefault("components", {})
    components["schemas"] = schemas
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    return document


def shape(**properties: Any) -> Object:
    """Return the schema of an object with all of these properties."""
    return {"type": "object", "required": [*properties], "properties": properties}


TEXT, WHOLE, MAYBE = {"type": "string"}, {"type": "integer"}, {"type": ["object", "null"]}
FINISH = {"enum": ["stop", "length", "cancelled"]}
USAGE = shape(prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE)
FIGURES = {"type": ["object", "array"]}


def answer(**choice: Any) -> Object:
    """Return the schema of a whole answer."""
    choice_schema = shape(index=WHOLE, **choice, logprobs=MAYBE, finish_reason=FINISH)
    return shape(
        id=TEXT,
        object=TEXT,
        created=WHOLE,
        model=TEXT,
        choices={"type": "array", "items": choice_schema},
        usage=USAGE,
        outpace=FIGURES,
    )


MODEL = shape(id=TEXT, object={"const": "model"}, created=WHOLE, owned_by=TEXT, outpace=shape())
ANSWERS: Object = {
    "ChatCompletion": answer(message=shape(role=TEXT, content=TEXT)),
    "Completion": answer(text=TEXT),
    "Model": MODEL,
    "Models": shape(object={"const": "list"}, data={"type": "array", "items": schema("Model")}),
    "Status": shape(status=TEXT),
}
