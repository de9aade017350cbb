"""What an answer must be as a whole, as OpenAI's and vLLM's clients ask for it."""

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
"""Most texts of which one may be the answer."""


def read_schema(text: str) -> dict[str, Any]:
    """A JSON schema that was sent as text."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError("it must be an object of JSON")
    return schema


Schema = dict[str, Any]
Written = Schema | Annotated[str, Field(max_length=LONGEST), AfterValidator(read_schema)]
Choices = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=CHOICES)]


class JsonSchema(Strict):
    """A schema with its name. It is always held to, with `strict` or without."""

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
        """A schema with its type, and only with it."""
        if (self.type == "json_schema") == (self.json_schema is None):
            raise ValueError("type='json_schema' and the field json_schema go together")
        return self


class StructuredOutputs(Strict):
    """vLLM's constraints, of which one is given."""

    json_: Annotated[Written | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None

    @model_validator(mode="after")
    def check_any(self) -> Self:
        """What holds nothing is a mistake."""
        given = (self.json_object or None, self.json_, self.regex, self.choice, self.grammar)
        if all(value is None for value in given):
            raise ValueError("must have one of json, json_object, regex, choice, grammar")
        return self


class Rule(NamedTuple):
    """A constraint: the option of the library, its value, and the field that gave it."""

    option: str
    value: Any
    field: str


FORMS = ("response_format", "structured_outputs", "guided")
"""How fields begin that give a constraint, in the order in which they are looked at."""

RULES = {
    field: option.name
    for form in FORMS
    for option in REQUEST.values()
    for field in option.fields
    if field.startswith(form)
}
"""Fields that give a constraint, and the options of the library that they are."""

OBJECTS = {"response_format.type": "json_object", "structured_outputs.json_object": True}
"""Fields that ask for any object, and the values with which they do so."""

ATTRIBUTES = {"schema": "schema_", "json": "json_"}
"""Fields whose names pydantic has taken."""


def at(asked: Any, field: str) -> Any:
    """What a request has at the path of a field; None where nothing stands there."""
    for name in field.split("."):
        asked = getattr(asked, ATTRIBUTES.get(name, name), None)
    return asked


class Constrained(Strict):
    """Fields that say what an answer must be; a request gives one of them at most."""

    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Written | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    @property
    def rules(self) -> Iterator[Rule]:
        """All constraints that are given."""
        for field, option in RULES.items():
            value = at(self, field)
            if field not in OBJECTS:
                if value is not None:
                    yield Rule(option, value, field)
            elif value == OBJECTS[field]:
                yield Rule(option, {"type": "object"}, field)

    @property
    def rule(self) -> Rule | None:
        """The constraint, where there is one."""
        return next(self.rules, None)

    @model_validator(mode="after")
    def check_rules(self) -> Self:
        """One is enough."""
        if len(rules := [*self.rules]) > 1:
            one, other = rules[0].field, rules[1].field
            message = f"{other}: {one} is a constraint as well; give one of them"
            raise OptionError(other, rules[1].value, message)
        return self
