"""Constraint fields of requests, as OpenAI's and vLLM's clients send them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from outpace.api.options import REQUEST
from outpace.constraint.pattern import LONGEST
from outpace.errors import OptionError
from outpace.server.bounds import Name, Strict, Text

CHOICES = 4096
"""Maximum number of alternatives in `choice`."""


def read_schema(text: str) -> dict[str, Any]:
    """Return the JSON schema contained in a text."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON object")
    return schema


Schema = dict[str, Any]
Written = Schema | Annotated[str, Field(max_length=LONGEST), AfterValidator(read_schema)]
Choices = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=CHOICES)]


class JsonSchema(Strict):
    """A named schema. It is always enforced, whatever the value of `strict`."""

    name: Name
    description: Text | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class Format(Strict):
    """OpenAI's format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        """Require a schema exactly for type `json_schema`."""
        if (self.type == "json_schema") == (self.json_schema is None):
            raise ValueError("type='json_schema' and the field json_schema go together")
        return self


class StructuredOutputs(Strict):
    """vLLM's constraints; at least one must be given."""

    json_: Annotated[Written | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None

    @model_validator(mode="after")
    def check_any(self) -> Self:
        """Require at least one constraint."""
        constraints = (self.json_object or None, self.json_, self.regex, self.choice, self.grammar)
        if all(value is None for value in constraints):
            raise ValueError("must have one of json, json_object, regex, choice, grammar")
        return self


class Rule(NamedTuple):
    """A constraint: the library's option, its value, and the request field that set it."""

    option: str
    value: Any
    field: str


FORMS = ("response_format", "structured_outputs", "guided")
"""Prefixes of constraint fields, in the order in which they are searched."""

RULES = {
    field: option.name
    for form in FORMS
    for option in REQUEST.values()
    for field in option.fields
    if field.startswith(form)
}
"""Options of the library by the request fields that set them."""

OBJECTS = {"response_format.type": "json_object", "structured_outputs.json_object": True}
"""Fields that request any JSON object, and the values that do so."""

ATTRIBUTES = {"schema": "schema_", "json": "json_"}
"""Attributes of fields whose own names pydantic reserves."""


def at(value: Any, field: str) -> Any:
    """Return the value at a field's dotted path; None if absent."""
    for name in field.split("."):
        value = getattr(value, ATTRIBUTES.get(name, name), None)
    return value


class Constrained(Strict):
    """Fields that constrain the answer; a request sets at most one of them."""

    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Written | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    @property
    def rules(self) -> Iterator[Rule]:
        """Yield all constraints of the request."""
        for field, option in RULES.items():
            value = at(self, field)
            if field not in OBJECTS:
                if value is not None:
                    yield Rule(option, value, field)
            elif value == OBJECTS[field]:
                yield Rule(option, {"type": "object"}, field)

    @property
    def rule(self) -> Rule | None:
        """The request's constraint, or None."""
        return next(self.rules, None)

    @model_validator(mode="after")
    def check_rules(self) -> Self:
        """Reject more than one constraint."""
        if len(rules := [*self.rules]) > 1:
            one, other = rules[0].field, rules[1].field
            message = f"{other}: cannot be combined with {one}; set only one constraint"
            raise OptionError(other, rules[1].value, message)
        return self
