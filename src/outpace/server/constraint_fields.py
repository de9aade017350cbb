"""Constraint fields of requests, as OpenAI's and vLLM's clients send them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from outpace.api.options import REQUEST_OPTIONS
from outpace.constraint.pattern import MAX_PATTERN_LENGTH
from outpace.constraint.schema import MAX_SCHEMA_DEPTH
from outpace.errors import OptionError
from outpace.server.bounds import BoundedText, Name, StrictModel

MAX_CHOICE_TEXTS = 4096
"""Maximum number of alternatives in `choice`."""


def parse_schema(text: str) -> dict[str, Any]:
    """Return the JSON schema contained in a string."""
    try:
        schema = json.loads(text)
    except RecursionError as error:
        message = f"it is too large: it is nested more than {MAX_SCHEMA_DEPTH} deep"
        raise ValueError(message) from error
    except ValueError as error:
        raise ValueError(f"must be JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON object")
    return schema


JsonObject = dict[str, Any]
SchemaOrText = (
    JsonObject | Annotated[str, Field(max_length=MAX_PATTERN_LENGTH), AfterValidator(parse_schema)]
)
ChoiceTexts = Annotated[
    list[BoundedText], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICE_TEXTS)
]


class JsonSchema(StrictModel):
    """A named schema. It is always enforced, whatever the value of `strict`."""

    name: Name
    description: BoundedText | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


class Format(StrictModel):
    """OpenAI's format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        """Require a schema exactly for type `json_schema`."""
        if (self.type == "json_schema") == (self.json_schema is None):
            raise ValueError("type='json_schema' and the field json_schema go together")
        return self


class StructuredOutputs(StrictModel):
    """vLLM's constraints; at least one must be given."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: BoundedText | None = None
    choice: ChoiceTexts | None = None
    grammar: BoundedText | None = None

    @model_validator(mode="after")
    def require_constraint(self) -> Self:
        """Require at least one constraint."""
        constraints = (self.json_object or None, self.json_, self.regex, self.choice, self.grammar)
        if all(value is None for value in constraints):
            raise ValueError("must have one of json, json_object, regex, choice, grammar")
        return self


class RequestConstraint(NamedTuple):
    """A constraint: the library's option, its value, and the request field that set it."""

    option: str
    value: Any
    field: str


FIELD_PREFIXES = ("response_format", "structured_outputs", "guided")
"""Prefixes of constraint fields, in the order in which they are searched."""

CONSTRAINT_FIELDS = {
    field: option.name
    for form in FIELD_PREFIXES
    for option in REQUEST_OPTIONS.values()
    for field in option.fields
    if field.startswith(form)
}
"""Options of the library by the request fields that set them."""

JSON_OBJECT_FIELDS = {"response_format.type": "json_object", "structured_outputs.json_object": True}
"""Fields that request any JSON object, and the values that do so."""

ATTRIBUTE_NAMES = {"schema": "schema_", "json": "json_"}
"""Attributes of fields whose own names pydantic reserves."""


def get_field(value: Any, field: str) -> Any:
    """Return the value at a field's dotted path; None if absent."""
    for name in field.split("."):
        value = getattr(value, ATTRIBUTE_NAMES.get(name, name), None)
    return value


class ConstraintFields(StrictModel):
    """Fields that constrain the answer; a request sets at most one of them."""

    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: BoundedText | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: BoundedText | None = None

    @property
    def constraints(self) -> Iterator[RequestConstraint]:
        """Yield all constraints of the request."""
        for field, option in CONSTRAINT_FIELDS.items():
            value = get_field(self, field)
            if field not in JSON_OBJECT_FIELDS:
                if value is not None:
                    yield RequestConstraint(option, value, field)
            elif value == JSON_OBJECT_FIELDS[field]:
                yield RequestConstraint(option, {"type": "object"}, field)

    @property
    def constraint(self) -> RequestConstraint | None:
        """The request's constraint, or None."""
        return next(self.constraints, None)

    @model_validator(mode="after")
    def check_single_constraint(self) -> Self:
        """Reject more than one constraint."""
        if len(rules := [*self.constraints]) > 1:
            one, other = rules[0].field, rules[1].field
            message = f"{other}: cannot be combined with {one}; set only one constraint"
            raise OptionError(other, rules[1].value, message)
        return self
