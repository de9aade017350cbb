"""Constraint options of a request as a rule: the name of an option and its text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outpace.errors import OptionError

ConstraintRule = tuple[str, str]
"""Option name (`schema`, `regex`, `choices`, `grammar`, `tools`) and its text, which is JSON for
`schema`, `choices` and `tools`. With `FREE_RULE`, only the length of thoughts is limited."""

FREE_RULE: ConstraintRule = ("max_reasoning_tokens", "")
"""Rule of an answer that is any text."""


def constraint_rule(
    *,
    schema: Any = None,
    regex: Any = None,
    choices: Any = None,
    grammar: Any = None,
) -> ConstraintRule | None:
    """Return the constraint of a request on its text, which has at most one.

    Args:
        schema: JSON schema as a mapping, or a pydantic model.
        regex: regular expression.
        choices: list of strings.
        grammar: Lark grammar.

    Raises:
        OptionError: if the value is invalid or there are two constraints.
    """
    values = {"schema": schema, "regex": regex, "choices": choices, "grammar": grammar}
    given = [name for name, value in values.items() if value is not None]
    if len(given) > 1:
        message = f"{given[1]} and {given[0]} are two constraints; give one"
        raise OptionError(given[1], values[given[1]], message)
    if schema is not None:
        return "schema", schema_text(schema)
    if choices is not None:
        return "choices", json.dumps(check_choices(choices))
    for name, value in (("regex", regex), ("grammar", grammar)):
        if value is not None and not isinstance(value, str):
            raise OptionError(name, value, f"{name} must be a string, got {value!r}")
    return None if not given else (given[0], values[given[0]])


def schema_text(schema: Any) -> str:
    """Return a JSON schema as text."""
    model = getattr(schema, "model_json_schema", None)
    found = model() if isinstance(schema, type) and callable(model) else schema
    if not isinstance(found, dict):
        message = f"schema must be a JSON schema (a dict) or a pydantic model, got {schema!r}"
        raise OptionError("schema", schema, message)
    try:
        return json.dumps(found)
    except RecursionError as error:
        message = "schema is too large: it is nested too deeply"
        raise OptionError("schema", schema, message) from error
    except (TypeError, ValueError) as error:
        raise OptionError("schema", schema, f"schema must be JSON: {error}") from error


def check_choices(choices: Any) -> Sequence[str]:
    """Return the strings of which one is the answer."""
    if not isinstance(choices, list | tuple) or not choices:
        message = f"choices must be a non-empty list of strings, got {choices!r}"
        raise OptionError("choices", choices, message)
    for number, choice in enumerate(choices):
        if not isinstance(choice, str):
            message = f"choices[{number}] must be a string, got {choice!r}"
            raise OptionError(f"choices[{number}]", choice, message)
    return list(choices)
