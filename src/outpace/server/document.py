"""The OpenAPI document: what FastAPI cannot know, since routes read and write bytes themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from outpace.server.fault import ENVELOPE
from outpace.server.schema import ChatRequest, CompletionRequest

Object = dict[str, Any]
REFERENCE = "#/components/schemas/{model}"

MEANINGS = {
    400: "The request is wrong; `param` names the field.",
    401: "No valid API key.",
    403: "A page of another site asks.",
    404: "There is no such model, or no such page.",
    405: "The page does not know this method.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    421: "The request was meant for another host.",
    429: "Too many requests are in hand; try again later.",
    431: "The headers are too large.",
    500: "Decoding failed.",
    503: "The server is about to end, or has failed.",
}


def schema(name: str) -> Object:
    """A named schema of the document."""
    return {"$ref": REFERENCE.format(model=name)}


def content(kind: str, what: Object) -> Object:
    """Content of one media type."""
    return {"content": {kind: {"schema": what}}}


def faults(*statuses: int) -> dict[int | str, Object]:
    """Answers that are errors."""
    described = ((status, MEANINGS[status]) for status in (401, 403, 408, 413, 421, *statuses))
    return {
        status: {"description": meaning, **content("application/json", schema("Error"))}
        for status, meaning in described
    }


def answers(name: str) -> dict[int | str, Object]:
    """Answers of a route that decodes."""
    both = content("application/json", schema(name))["content"]
    both |= content("text/event-stream", {})["content"]
    ok = {"description": "The answer, whole or as a stream.", "content": both}
    return {200: ok, **faults(400, 404, 429, 500, 503)}


def body(kind: type[BaseModel]) -> Object:
    """The body of a route, for `openapi_extra`."""
    return {"requestBody": {"required": True, **content("application/json", schema(kind.__name__))}}


def completed(document: Object, models: Iterable[str]) -> Object:
    """A document with the schemas that it names, and the models that requests may name."""
    schemas: Object = {"Error": ENVELOPE, **ANSWERS}
    for kind in (ChatRequest, CompletionRequest):
        own = kind.model_json_schema(ref_template=REFERENCE)
        own["properties"]["model"]["enum"] = [*models]
        schemas |= own.pop("$defs", {}) | {kind.__name__: own}
    components = document.setdefault("components", {})
    components["schemas"] = schemas
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    return document


def shape(**properties: Any) -> Object:
    """An object that has all of these."""
    return {"type": "object", "required": [*properties], "properties": properties}


TEXT, WHOLE, MAYBE = {"type": "string"}, {"type": "integer"}, {"type": ["object", "null"]}
FINISH = {"enum": ["stop", "length", "cancelled"]}
USAGE = shape(prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE)
FIGURES = {"type": ["object", "array"]}


def answer(**choice: Any) -> Object:
    """The object of a whole answer."""
    each = shape(index=WHOLE, **choice, logprobs=MAYBE, finish_reason=FINISH)
    return shape(
        id=TEXT,
        object=TEXT,
        created=WHOLE,
        model=TEXT,
        choices={"type": "array", "items": each},
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
